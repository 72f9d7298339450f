"""Entries of media: content parts, what they hold, and options."""

from collections.abc import Mapping

from ..field_rules import Place, Rule, only, refused, without_effect
from ..harmless import EMPTY, OBJECT, one_of
from .common import CACHED

OPTION_NAMES = ("fps", "min_frames", "max_frames", "min_pixels", "max_pixels", "use_audio_in_video", "token_share")
_PIXELS = "give min_pixels and max_pixels"
_OPTIONS: Mapping[str, Rule] = {
    **dict.fromkeys(("num_frames", "nframes"), refused("give max_frames")),
    "total_pixels": refused("give max_pixels and max_frames"),
    **dict.fromkeys(("resized_height", "resized_width"), refused(_PIXELS)),
    **dict.fromkeys(("video_start", "video_end"), refused("cut the video before it is sent")),
}
_SENT: Mapping[str, Rule] = {
    **dict.fromkeys(("cache_control", "prompt_cache_breakpoint"), without_effect(CACHED, OBJECT)),
    **dict.fromkeys(("id", "uuid"), without_effect("media are known by their bytes")),
    **dict.fromkeys(("citations", "title", "context"), without_effect("the model sees the medium alone")),
}
PART = Place(
    "parts of media",
    (
        "type", "image_url", "video_url", "audio_url", "input_audio", "input_video", "image", "video", "audio", "source", "detail",
        *OPTION_NAMES, "sample_fps", "raw_fps",
    ),
    {**_SENT, **_OPTIONS, "file_id": refused("files are not kept; give a data: URL")},
)  # fmt: skip
KWARGS = Place(
    "`mm_processor_kwargs`",
    (*OPTION_NAMES, "do_sample_frames"),
    {
        **_OPTIONS,
        "size": only(EMPTY, _PIXELS),
        "do_resize": only(one_of(True), _PIXELS),
        **dict.fromkeys(("images_kwargs", "videos_kwargs"), only(EMPTY, "put its options into mm_processor_kwargs itself")),
    },
)
READING = Place("`media_io_kwargs`", ("video",), known="options of media are video")
READING_VIDEO = Place("`media_io_kwargs.video`", ("fps", "num_frames"), known="options of video are fps, num_frames")
URL = Place(
    "URLs of parts",
    ("url", "detail"),
    dict.fromkeys(("format", "mime_type", "media_type", "id", "uuid"), without_effect("the bytes say what it is")),
)
INLINE = Place("base64 of parts", ("data", "format"), {"id": without_effect("nothing reads it")})
SOURCE = Place("`source` of blocks", ("type", "media_type", "data", "url"))
