"""Properties are tried without a limit of time for each try: the machine may be busy with something else."""

from hypothesis import settings

settings.register_profile("core", deadline=None)
settings.load_profile("core")
