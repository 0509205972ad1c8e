"""specsim completion"""

from __future__ import annotations

import click

from specsim.commands.common import OneOf

SHELLS = ("bash", "zsh", "fish")


@click.command()
@click.argument("shell", type=OneOf(SHELLS), metavar="bash|zsh|fish")
def command(shell: str) -> None:
    """Print the script that completes specsim's commands, options and names (models, boxes, methods, ...) in a shell.

    \b
    For this shell, and in ~/.bashrc or ~/.zshrc for all:
      eval "$(specsim completion bash)"
    For fish:
      specsim completion fish > ~/.config/fish/completions/specsim.fish

    \b
    Example:
      specsim completion zsh
    """
    from click.shell_completion import get_completion_class

    made = get_completion_class(shell)
    assert made is not None
    click.echo(made(click.Command("specsim"), {}, "specsim", "_SPECSIM_COMPLETE").source(), nl=False)
