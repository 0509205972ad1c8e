"""Microbenchmarks: what one box does with the operators of a forward pass, and with nothing that knows a model.

Each module that measures something supplies the same few names:

    NAME      what `--only` calls it
    WHAT      what is measured, AGAINST what it is compared or checked, UNITS of its samples
    CLASSES   operators of its cases, which `--skip` can leave out
    RANKS     "one" (GPU 0 alone), "all" (every rank at once) or "groups" (subgroups of 2 up to all ranks)
    cases(context) -> list[Case]           sizes to measure
    run(context, case) -> Measurement      samples in seconds
    NEEDS     where it cannot be measured on every box: what it takes

and, where kernels are compiled at their first use, `compile_s(case)`, the seconds that may take, and `prepare(context, case)`.

Modules: gemm, blockwise, moe, attention, small, peak, launches, copies, allreduce. `timing` and `between` hold the clocks, `worker`
runs them in one process a GPU, `launch` starts and watches those processes, `health` reads nvidia-smi. Only the worker's
side imports torch.
"""

MEASUREMENTS = ("peak", "launches", "small", "gemm", "blockwise", "moe", "attention", "copies", "allreduce")
