"""An MLP of few rows in one launch, down(relu(up(x))^2); reference.py is its meaning."""

from pallas_kernels.mlp_step.api import declined, mlp_step, supported

__all__ = ["declined", "mlp_step", "supported"]
