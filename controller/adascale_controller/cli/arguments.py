"""Arguments that several commands have."""

from __future__ import annotations

from pathlib import Path
from typing import Annotated

import typer

JobFile = Annotated[
    Path, typer.Argument(metavar="FILE", help="A YAML file with an AdaScaleJob.", show_default=False)
]
