"""Where the program starts: Ctrl-C is taken care of before anything heavy is imported."""

import sys

from nemotron_jax import interrupts


def main() -> int:
    interrupts.install()
    from nemotron_jax.cli import main as command

    return interrupts.run(command)


if __name__ == "__main__":
    sys.exit(main())
