"""``mmrt pull``: fetch a model from a hub, after its headers have been judged."""

import os
import sys
from typing import Annotated

import typer

from ..hub.names import parse_name
from ..hub.repository import is_adapter
from ..runtime.environment import read_environment
from .options import ConfigFile, Device, Dtype, MaxContext, configuration, override
from .up import reporter_of


def register(app: typer.Typer) -> None:
    @app.command()
    def pull(
        model: Annotated[str, typer.Argument(metavar="MODEL", help="ORG/REPO, of GGUF files :TAG as Q4_K_M, and @REVISION.")],
        config: ConfigFile = None,
        max_context: MaxContext = None,
        dtype: Dtype = None,
        device: Device = None,
        quiet: Annotated[bool, typer.Option("--quiet", "-q", help="Say nothing unless it fails.")] = False,
    ) -> None:
        """Fetch a model from Hugging Face, or a mirror ($HF_ENDPOINT).

        Its headers are fetched first: a model that mmrt does not serve, or that does not fit, is not fetched. It lies in
        the cache of huggingface_hub ($HF_HOME); what has come stays there, and the same command goes on. Gated models need
        $HF_TOKEN.
        """
        from .draft_check import judge_of
        from .fetching import fetch_model

        environment = read_environment()
        name = parse_name(model)
        if name is None:
            raise typer.BadParameter(f"{model!r} is no name on a hub: expected ORG/REPO, ORG/REPO:TAG or ORG/REPO@REVISION")
        options = {"model.max_context": max_context, "model.dtype": dtype, "model.device": device}
        settings = override(configuration(config, environment), options)
        reporter = None if quiet else reporter_of(settings, environment, sys.stdout)
        found = fetch_model(name, judge_of(settings, environment, reporter, is_for_now=False), reporter)
        if reporter is not None:
            is_alone = is_adapter(os.listdir(found.path)) if found.path.is_dir() else False
            use = f"mmrt up MODEL --adapter {model}" if is_alone else f"mmrt up {model}"
            reporter.message(f"{name} is in {os.path.normpath(found.path)}: {use}")
