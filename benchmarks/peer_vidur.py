"""Requests a second of Vidur's event loop, for `benchmarks/simulate_speed.py --vidur-python`; runs where vidur is importable.

    python benchmarks/peer_vidur.py REQUESTS

The load of simulate_speed.py: 4,096 input and 256 output tokens, at most 32 in a batch, all there at once (Vidur has no closed
loop; with all waiting, 32 are always in flight). Its wheel has no profiled times, so every step takes a constant and looking
times up costs nothing; metrics and plots are off. What is timed is scheduling and events alone, which flatters it. Times are CPU
seconds of one process. Written for vidur 0.0.26. Prints one JSON document.
"""

from __future__ import annotations

import json
import sys
import time

import vidur.execution_time_predictor as predictors
from vidur._native.entities import ExecutionTime
from vidur.config import config as options
from vidur.simulator import Simulator


class Constant:
    """Every step takes the same time."""

    def get_execution_time(self, batch: object, stage: int) -> ExecutionTime:
        return ExecutionTime(1, *[1.0] * 12, 0.0, 0.0)  # one layer, its operators, no communication


def main() -> None:
    """Time one run."""
    requests = int(sys.argv[1])
    predictors.ExecutionTimePredictorRegistry.get = classmethod(lambda *_, **__: Constant())
    off = ("write_metrics", "enable_chrome_trace", "store_plots", "store_request_metrics", "store_batch_metrics", "store_utilization_metrics")  # fmt: skip
    simulator = Simulator(
        options.SimulationConfig(
            log_level="error",
            cluster_config=options.ClusterConfig(
                num_replicas=1,
                replica_config=options.ReplicaConfig(num_pipeline_stages=1, tensor_parallel_size=1),
                replica_scheduler_config=options.SarathiSchedulerConfig(batch_size_cap=32, chunk_size=8192),
            ),
            request_generator_config=options.SyntheticRequestGeneratorConfig(
                length_generator_config=options.FixedRequestLengthGeneratorConfig(
                    prefill_tokens=4096, decode_tokens=256
                ),
                interval_generator_config=options.StaticRequestIntervalGeneratorConfig(),
                num_requests=requests,
                max_tokens=8192,
            ),
            metrics_config=options.MetricsConfig(**dict.fromkeys(off, False)),
        )
    )
    simulator._write_output = lambda: None
    cpu, wall = time.process_time(), time.perf_counter()
    simulator.run()
    cpu, wall = time.process_time() - cpu, time.perf_counter() - wall
    print(json.dumps({"requests": requests, "cpu_s": cpu, "wall_s": wall}))


if __name__ == "__main__":
    main()
