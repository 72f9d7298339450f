"""``mmrt ask``: send one question to a running endpoint and stream the answer to the terminal."""

import sys
from typing import Annotated, Any

import typer

from ..runtime.environment import read_environment
from .endpoint import ApiKey, ModelName, Url, find_endpoint, media_part
from .options import RunName
from .terminal import ThoughtView, printable


def register(app: typer.Typer) -> None:
    @app.command()
    def ask(
        question: Annotated[
            str | None, typer.Argument(metavar="QUESTION", help='What to ask; "-", or none in a pipe, reads standard input.')
        ] = None,
        image: Annotated[list[str] | None, typer.Option(metavar="FILE", help='An image file, or "-"; may be repeated.')] = None,
        video: Annotated[list[str] | None, typer.Option(metavar="FILE", help='A video file, or "-"; may be repeated.')] = None,
        audio: Annotated[list[str] | None, typer.Option(metavar="FILE", help='An audio file, or "-"; may be repeated.')] = None,
        url: Url = None,
        api_key: ApiKey = None,
        model: ModelName = None,
        system: Annotated[str | None, typer.Option(metavar="TEXT", help="A system prompt.")] = None,
        max_tokens: Annotated[int | None, typer.Option(metavar="N", help="Length of the answer at most.")] = None,
        temperature: Annotated[float | None, typer.Option(metavar="T", help="0 is greedy.")] = None,
        seed: Annotated[int | None, typer.Option(metavar="N", help="Of the random draws.")] = None,
        guidance_scale: Annotated[float | None, typer.Option(metavar="S", help="Classifier-free guidance; 1 is off.")] = None,
        negative_prompt: Annotated[str | None, typer.Option(metavar="TEXT", help="What to steer away from, with guidance.")] = None,
        run: RunName = None,
    ) -> None:
        """Ask the model about text, images, videos and sounds.

        The answer is streamed. The demo model, which is served where no other is named, knows simple shapes, numbers, motion and beeps,
        nothing else.
        """
        files = {"image_url": image or [], "video_url": video or [], "input_audio": audio or []}
        question = _question(question, [file for some in files.values() for file in some].count("-"))
        media = [media_part(kind, file) for kind, some in files.items() for file in some]
        server = find_endpoint(url, api_key, run)
        content: Any = [*media, {"type": "text", "text": question}]
        messages = [{"role": "system", "content": system}] if system is not None else []
        body: dict[str, Any] = {
            "model": model or server.first_model(),
            "messages": [*messages, {"role": "user", "content": content if media else content[0]["text"]}],
            "stream": True,
            "max_tokens": max_tokens,
            "temperature": temperature,
            "seed": seed,
            "guidance_scale": guidance_scale,
            "negative_prompt": negative_prompt,
        }
        text, shown = None, printable if sys.stdout.isatty() else str
        thoughts = ThoughtView(sys.stderr, is_plain=read_environment().plain_output)
        try:
            for text in server.stream({key: value for key, value in body.items() if value is not None}, thoughts.add):
                thoughts.end()
                print(shown(text), end="", flush=True)
        finally:
            thoughts.end()
            if text is not None:  # what broke off ends its line, too
                print(flush=True)
        if server.finish_reason == "length":
            print("(cut off at the limit of its length: --max-tokens, or the model's context)", file=sys.stderr)


def _question(given: str | None, num_piped_media: int) -> str:
    """The question as given, or from standard input. Raises BadParameter if that is asked for twice, is a terminal, or is empty."""
    is_piped = given == "-" or (given is None and not num_piped_media)
    if num_piped_media + (given == "-") > 1:
        raise typer.BadParameter("standard input (-) can be read once")
    if not is_piped and given is None:
        raise typer.BadParameter("it is missing, and standard input is for the medium", param_hint="QUESTION")
    if given is None and sys.stdin.isatty():
        raise typer.BadParameter('it is missing: mmrt ask "Hello", or echo "Hello" | mmrt ask', param_hint="QUESTION")
    text = sys.stdin.buffer.read().decode(errors="replace") if is_piped else given or ""
    if is_piped and not text.strip():
        raise typer.BadParameter("standard input holds no question", param_hint="QUESTION")
    return text
