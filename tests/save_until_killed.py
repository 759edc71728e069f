"""A process that saves over a checkpoint again and again until it is killed, with two folders' weights in turn."""

import sys

import jax


def main(first: str, second: str, path: str) -> None:
    jax.config.update("jax_platforms", "cpu")
    import nemotron_jax

    models = [nemotron_jax.load(first), nemotron_jax.load(second)]
    nemotron_jax.save(models[0], path)
    print("ready", flush=True)
    for turn in range(1, 1_000_000):
        nemotron_jax.save(models[turn % 2], path)


if __name__ == "__main__":
    main(*sys.argv[1:])
