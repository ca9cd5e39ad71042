"""Links torch, and what it requires, into another environment: link_torch.py ENVIRONMENT.

For an environment of the same version of Python, whose installer then finds them installed.
"""

import re
import sys
from importlib.metadata import Distribution, PackageNotFoundError, distribution
from pathlib import Path


def required(name: str, found: dict[str, Distribution]) -> dict[str, Distribution]:
    """Add a distribution and all that it requires here to `found`."""
    name = re.sub(r"[-_.]+", "-", name).lower()
    if name in found:
        return found
    try:
        found[name] = distribution(name)
    except PackageNotFoundError:
        return found  # of an extra, or for another platform
    for requirement in found[name].requires or ():
        if "extra ==" not in requirement:
            required(re.split(r"[^\w.-]", requirement)[0], found)
    return found


environment = Path(sys.argv[1])
packages = next((environment / "lib").glob("python3.*/site-packages"))
for one in required("torch", {}).values():
    for entry in {file.parts[0] for file in one.files or ()} - {"..", "__pycache__"}:
        target = packages / entry
        if not target.is_symlink():
            target.symlink_to(Path(str(one.locate_file(entry))).resolve())
script = environment / "bin" / "torchrun"
script.write_text(f"#!{environment}/bin/python\nfrom torch.distributed.run import main\n\nmain()\n")
script.chmod(0o755)
