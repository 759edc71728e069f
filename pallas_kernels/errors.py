"""The one exception by which a kernel declines a call that it cannot serve."""


class Unsupported(NotImplementedError):
    """The requested implementation cannot run here; the message says why and what would.

    It is raised from static checks only (shapes, dtypes, mesh, platform), before any kernel is traced, so every rank of
    a program raises it or none does. A caller that holds an alternative may catch it; every other exception is a fault.
    """
