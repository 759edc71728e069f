import sys

from nemotron_jax.cli import main

sys.exit(main())
