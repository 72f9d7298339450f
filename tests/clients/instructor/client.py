"""instructor: its modes of tools and JSON, pictures, lists, partial objects, retries, errors."""

from typing import Any

import instructor
import openai
from instructor.core import InstructorRetryException
from served import BASE_URL, COLOUR, HELLO, MODEL, PICTURE_URL
from shape import Shape

plain = openai.OpenAI(base_url=BASE_URL, api_key="none", max_retries=0, timeout=60)
for mode in (instructor.Mode.TOOLS, instructor.Mode.TOOLS_STRICT, instructor.Mode.JSON_SCHEMA):
    client: Any = instructor.from_openai(plain, mode=mode)
    asked: Any = {"model": MODEL, "max_retries": 0, "temperature": 0, "max_tokens": 256}
    shape, completion = client.create_with_completion(
        messages=[{"role": "user", "content": "A red circle."}], response_model=Shape, **asked
    )
    assert isinstance(shape, Shape) and completion.usage.completion_tokens > 1, mode
    content = [COLOUR, instructor.Image.from_base64(PICTURE_URL)]
    seen = client.create(messages=[{"role": "user", "content": content}], response_model=Shape, **asked)
    assert isinstance(seen, Shape), mode
    parts = list(client.create_partial(messages=[{"role": "user", "content": "A red circle."}], response_model=Shape, **asked))
    assert Shape.model_validate(parts[-1].model_dump()), mode
    try:
        client.create(messages=[{"role": "user", "content": HELLO}], response_model=Shape, **{**asked, "temperature": 9})
    except (InstructorRetryException, openai.BadRequestError) as raised:
        assert "temperature" in str(raised), mode
    else:
        raise AssertionError("a temperature of 9 was not refused")
