"""The parts of the model that the gateway needs. Loaded while it is still a standby."""

from typing import NamedTuple

from ...models.checkpoint.files import files_of_tensors
from ...models.config import load_model_config
from ...models.text.chat_template import ChatTemplate
from ...models.text.tokenizer import Tokenizer
from ..host.actor import Actor
from ..host.media_rules import for_run
from .reading.output_fields import MAX_CHOICES
from .reading.prompt import PromptBuilder
from .reading.validation import Limits


class TextStack(NamedTuple):
    """The limits of the model's requests, and the way from messages to token ids."""

    limits: Limits
    prompts: PromptBuilder


def load_text_stack(actor: Actor) -> TextStack:
    """Read tokenizer, chat template and model facts of the checkpoint. Raises CheckpointError."""
    layout = actor.wait_for_layout()
    model = load_model_config(actor.model_path)
    tokenizer = Tokenizer.load(actor.model_path, control_ids=model.control_ids)
    template = ChatTemplate.load(actor.model_path, tokenizer.special_tokens)
    prompts = PromptBuilder(tokenizer, template, model, layout.max_context)
    limits = Limits(
        model_name=actor.config.model.name or actor.model_path.name,
        family=model.family,
        kinds=model.media_kinds,
        takes_tools=template.calls_are_known,
        thinks=prompts.thinks,
        max_tool_bytes=actor.config.server.max_tool_schema_kib << 10,
        weight_bytes=sum(file.stat().st_size for file in files_of_tensors(actor.model_path)),
        max_context=layout.max_context,
        max_choices=min(MAX_CHOICES, layout.num_rows),
        hidden_size=model.language.hidden_size,
        sampling=model.sampling,
        media=actor.config.media,
        vision_rules=for_run(model, actor.config.media).vision_rules,
        sound_frame_s=0.0 if model.audio_rules is None else model.audio_rules.hop / model.audio_rules.sample_rate,
        speech=model.speech,
    )
    return TextStack(limits, prompts)
