"""What ``dump_pytorch_reference.py`` is made of. Needs torch and transformers, and no JAX."""
