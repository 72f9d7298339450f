"""Wordings that the demo model's training does not have, for what it can answer: does it know a question again that is put otherwise?

Who wrote these had seen two or three examples of each kind of question; who wrote those of the training had not seen these. What came
out alike is left out, but many differ by a word or two.
"""

import re
from dataclasses import replace

from ..data import Question
from ..data.drawing import Rng
from ..data.kinds import pick
from ..data.phrases import fill

_SLOT = re.compile(r"{(\w+)}")
OTHERWISE: dict[str, tuple[str, ...]] = {
    "shape": (
        "Can you tell me which shape this is?",
        "Could you identify the shape for me?",
    ),
    "colour": (
        "what colour's this?",
        "Which colour does this thing have?",
        "Can you tell what color this shape is?",
        "so what color am I looking at?",
    ),
    "describe": (
        "what's in the pic?",
        "Can you describe this picture for me?",
        "What does this image show?",
        "Tell me everything that's in this photo",
    ),
    "size": (
        "is this a large one or a little one?",
        "How big is it, large or small?",
        "Would you say the {shape} is big or small?",
        "what size is the {colour} {shape}?",
    ),
    "position": (
        "whereabouts in the picture is it?",
        "What part of the image is it in?",
        "Can you tell me where the {colour} {shape} is?",
        "which part of the pic is the {shape} in?",
    ),
    "count": (
        "how many shapes do you see?",
        "Can you count the objects for me?",
        "How many items are there altogether?",
        "what's the total number of things here?",
    ),
    "count_shape": (
        "how many {shapes} can you see?",
        "Can you count the {shapes} for me?",
        "I'd like to know how many {shapes} this image has.",
    ),
    "count_colour": (
        "how many of them are {colour}?",
        "Can you count all the {colour} ones?",
        "How many {colour} objects do you see here?",
        "how many shapes are {colour}?",
    ),
    "count_both": (
        "how many {colour} {shapes} can you see?",
        "Could you count the {colour} {shapes}?",
        "Tell me how many {colour} {shapes} you can find.",
        "number of {colour} {shapes} in this pic?",
    ),
    "exists": (
        "do you see {a} {colour} {shape} anywhere?",
        "Can you find {a} {colour} {shape} in this image?",
        "Does this picture have {a} {colour} {shape} in it?",
        "is there {a} {colour} {shape} in here or not?",
    ),
    "exists_shape": (
        "Does the image contain a {shape}?",
        "is there a {shape} anywhere here?",
        "Is one of these things a {shape}?",
    ),
    "exists_colour": (
        "is anything {colour} in here?",
        "Can you see {a} {colour} object?",
        "do you see anything {colour}?",
        "Are any of the shapes {colour}?",
    ),
    "exists_number": (
        "are there just {number} {group} in here?",
        "Can you find exactly {number} {group}?",
        "do I see {number} {group} here or not?",
        "Does this have exactly {number} {group} in it?",
    ),
    "find_colour": (
        "Can you tell me the colour of the {shape}?",
        "Which color is that {shape}?",
        "I see a {shape}, what colour is it?",
    ),
    "find_shape": (
        "what's the {colour} one?",
        "Which shape is the one in {colour}?",
        "What kind of shape is the {colour} object?",
        "Can you tell me what the {colour} thing is?",
    ),
    "side": (
        "is the {one} on the left or right side of the {other}?",
        "Which side is the {one} on relative to the {other}?",
        "Where's the {one}, left or right of the {other}?",
    ),
    "digits": (
        "Can you read the number for me?",
        "Which number is written here?",
    ),
    "number_colour": (
        "what colour is this number written in?",
        "Which color are the digits?",
        "Can you tell me what color the number is?",
        "what's the number's colour?",
    ),
    "pair_more": (
        "which one's got more stuff in it?",
        "Does the first or the second picture have more shapes?",
        "In which of the two pictures are there more things?",
        "where are there more objects, first or second image?",
    ),
    "pair_count": (
        "how many shapes does the {nth} picture have?",
        "how many objects are in the {nth} one?",
        "Can you count the things in the {nth} picture for me?",
        "What's the number of objects in the {nth} image?",
    ),
    "pair_colour": (
        "are they the same colour?",
        "do these two match in color?",
        "Are both shapes the same color?",
    ),
    "pair_shape": (
        "do both pics show the same kind of shape?",
        "Are these two identical in shape?",
    ),
    "pair_bigger": (
        "Which of the two shapes is the bigger one?",
        "what's bigger, the first or the second?",
        "In which picture is the shape larger?",
    ),
    "pair_which": (
        "what's in the {nth} one?",
        "Can you tell me what the {nth} picture shows?",
        "what do you see in the {nth} image?",
        "Describe the {nth} picture please",
    ),
    "moving": (
        "what's moving here?",
        "Which object is moving around?",
        "Can you tell me which thing moves?",
        "what is it that's moving in the clip?",
    ),
    "video_describe": (
        "what's going on in this video?",
        "Can you describe what happens in the clip?",
        "Could you explain what goes on in this clip?",
    ),
    "video_seen": (
        "What can be seen in this clip?",
        "Tell me what you can see in the video",
    ),
    "direction": (
        "what direction is it going?",
        "where's it heading, left, right, up or down?",
        "In which direction is the {colour} {shape} moving?",
    ),
    "speed": (
        "is it moving quickly or slowly?",
        "what's its speed, fast or slow?",
        "Is the {colour} {shape} moving fast or slow?",
        "how quickly is the {shape} going?",
    ),
    "first": (
        "Which thing comes up {nth} in the clip?",
        "What do you see {nth} in the video?",
        "which object is {nth} to appear?",
    ),
    "blinks": (
        "Can you count the blinks?",
        "How many times did the {colour} {shape} flash?",
        "how often does the {shape} blink in the video?",
    ),
    "pitch": (
        "is that a high or a low sound?",
        "Is this tone high-pitched or low-pitched?",
        "how's the pitch, high or low?",
        "Would you call this a high note or a low note?",
    ),
    "glide": (
        "is the pitch going up or down?",
        "Does the tone get higher, get lower or stay the same?",
        "is the sound rising or falling?",
        "How does the pitch change over time?",
    ),
    "beeps": (
        "Can you count the beeps for me?",
        "How many beeps did you hear in the recording?",
    ),
    "tone_noise": (
        "is that a tone or just noise?",
        "Do I hear a clear tone or noise?",
        "What kind of sound is this, a tone or noise?",
    ),
    "sound_describe": (
        "Can you describe the sound for me?",
        "What can you hear in this recording?",
        "what does the audio sound like?",
    ),
    "match": (
        "do the picture and the sound go together?",
        "does the audio fit the image?",
        "Is the beep count equal to the number of objects?",
    ),
    "video_match": (
        "do the video and the sound go together?",
        "Does it beep as many times as it blinks?",
        "is the number of blinks equal to the number of beeps?",
        "Does what I hear fit what's in the video?",
    ),
}
TALK_OTHERWISE = {
    "Hello! Show me a picture, a video or a sound.": "Hey, good morning!",
    "I answer short questions about pictures, videos and sounds of simple things.": "What kind of questions can I ask you?",
    "No, I am a small program.": "Am I talking to a real person?",
    "Circle, square, triangle, star, cross and heart.": "What shapes are you able to recognise?",
    "Red, orange, yellow, green, blue, purple, white and black.": "Give me a list of the colors you can tell apart.",
    "Yes. Send me a picture and ask about it.": "Are you able to look at a photo?",
    "Yes. Send me a sound and ask about it.": "Can you listen to a recording?",
    "Yes. Send me a video and ask about it.": "Are you able to look at a video clip?",
    "No. I only write text.": "Can you talk to me out loud?",
    "I only know a little English.": "Do you understand German?",
    "mmrt serves multimodal language models on one machine.": "What is mmrt good for?",
    "Text, image, video and audio in, text out.": "What kinds of input and output does mmrt support?",
    "mmrt is a multimodal runtime.": "What do the letters mmrt stand for?",
    "Run mmrt up.": "How can I launch mmrt?",
    "Run mmrt down.": "How can I shut mmrt down?",
    "Run mmrt ask with your question and a file.": "How do I send a question from the command line?",
    "Run mmrt status.": "Is there a way to check whether everything is running?",
    "Run mmrt logs.": "Where can I read the log output?",
    "Run mmrt restart and the name of the actor. Streams go on.": "How do I restart just one actor without losing streams?",
    "Run mmrt up with --model and a directory.": "I want to run a different model, how?",
    "Qwen2.5-VL and Qwen2.5-Omni.": "Is Qwen supported?",
    "Run mmrt model make. Its weights are random.": "How can I create a model with random weights?",
    "Run mmrt bench serve and see.": "How can I run a benchmark?",
    "Run mmrt config show.": "How do I print the current config?",
    "Run mmrt config check with the file.": "How do I find out if my config file is valid?",
    "With one TOML file.": "What format is the config file in?",
    "It listens on 127.0.0.1, port 8000.": "What address does the server listen on?",
    "It speaks the chat completions API of OpenAI.": "Is it compatible with the OpenAI client?",
    "It runs on the CPU. On CUDA it has not been tried.": "Will it work without a graphics card?",
    "Linux and Python 3.11 or newer.": "Which Python version do I need?",
    "One machine.": "Can I spread mmrt over several machines?",
    "An actor is a process that does one stage.": "What do you mean by an actor?",
    "Memory, controller, gateway, video, encoder, prefill, decode and detokenizer.": "What are all the actors called?",
    "The controller admits requests, gives out pages and makes plans.": "Who decides which requests are admitted?",
    "The gateway speaks HTTP and makes tokens of text.": "Which actor takes the HTTP requests?",
    "The video actor decodes images, videos and sounds.": "Which actor decodes the video files?",
    "The encoder runs the towers for vision and sound.": "Which actor runs the vision tower?",
    "Prefill runs the model over the prompt in chunks.": "Which actor processes the prompt in chunks?",
    "Decode samples the tokens of all requests in one batch.": "Which actor does the sampling?",
    "The detokenizer turns tokens into text.": "Who turns the tokens back into text?",
    "The supervisor starts, watches and restarts the actors.": "Who restarts the actors when they crash?",
    "A new one starts, and the text goes on where it was.": "What if the decode process crashes?",
    "Its connections are lost and their requests are cancelled.": "Do I lose my connection if the gateway crashes?",
    "Pools hold pages: media, patch, embedding and KV.": "What kinds of pools are there?",
    "A plan is work for video, encoder or prefill.": "What does a plan contain?",
    "A ring is a queue in shared memory.": "What is a ring used for?",
    "The journal holds the definitions and ends of requests.": "What gets written to the journal?",
    "Who holds the role lock of an actor may write.": "How does an actor get the right to write?",
    "A doorbell wakes an actor and says nothing.": "What is the doorbell for?",
    "The zygote has imported torch and forks actors.": "What is the zygote process for?",
    "A tower is the network for vision or for sound.": "What does tower mean here?",
    "The bus carries messages over ZeroMQ.": "Why does mmrt use ZeroMQ?",
    "Everything that matters lies in shared memory.": "What is kept in shared memory?",
    "Guidance pushes the answer away from the companion prompt.": "How does classifier-free guidance work?",
    "The companion is the prompt without media, for guidance.": "What is the companion prompt for?",
    "Run mmrt version.": "How do I find out which mmrt version I have?",
    "JPEG, PNG, WebP, GIF and BMP.": "What image file types can I upload?",
    "WAV, MP3, FLAC, Ogg, Opus, M4A, AAC and WebM.": "Is FLAC audio supported?",
    "MP4, MOV, WebM, Matroska, AVI and more.": "Does it accept MP4 files?",
    "Two frames per second.": "At what frame rate do you sample videos?",
    "No. Media are sent as data URLs.": "Can I give you the URL of an image?",
    "No message of mmrt is a pickle.": "Are the messages pickled?",
    "Run mmrt units.": "How do I run mmrt as a systemd service?",
    "Read the README and docs.": "Where can I read more about mmrt?",
}


def put_otherwise(rng: Rng, question: Question) -> Question | None:
    """The same question in other words that say no less; None if there are none."""
    wording = question.wording
    if wording is None:
        return None
    said = {*_SLOT.findall(wording.template)}
    fitting = [text for text in OTHERWISE[wording.phrase] if said <= {*_SLOT.findall(text)}]
    return replace(question, text=fill(pick(rng, fitting), **dict(wording.slots))) if fitting else None
