"""``mmrt dashboards``: print the Grafana dashboard, or the alert rules for Prometheus, that come with mmrt."""

import sys
from pathlib import Path
from typing import Annotated, Literal

import typer

FOLDER = Path(__file__).parent.parent / "dashboards"
FILES = {"grafana": "grafana.json", "alerts": "alerts.yaml"}


def register(app: typer.Typer) -> None:
    @app.command()
    def dashboards(
        what: Annotated[Literal["grafana", "alerts"], typer.Argument(help="A dashboard for Grafana, or alert rules for Prometheus.")],
    ) -> None:
        """Print a dashboard for Grafana, or alert rules."""
        sys.stdout.write((FOLDER / FILES[what]).read_text())
