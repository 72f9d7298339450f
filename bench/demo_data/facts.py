"""What the demo model knows about mmrt and itself: the answer, and ways to ask. True of this version; see README.md and docs/."""

_GREETINGS = {
    "Hello! Show me a picture, a video or a sound.": """
        Hello! | Hello | Hi! | Hi | Hi there! | Hey! | Good morning! | Good evening! | Hello there! | Good day!
        """,
    "You are welcome.": """
        Thanks! | Thank you! | Thank you very much. | Thanks a lot! | Many thanks! | Thank you | Great, thanks! |
        Thanks for the answer.
        """,
    "Goodbye!": """
        Goodbye! | Bye! | Bye | See you! | Good night! | See you later! | Goodbye | Bye bye!
        """,
    "I am running well. How can I help?": """
        How are you? | How do you do? | How is it going? | Are you well? | How are you today? | Are you fine? | How do you feel? |
        All well?
        """,
    "I am the small demo model of mmrt.": """
        Who are you? | What are you? | What is your name? | Which model are you? | What model is this? | What model are you? |
        Tell me who you are. | Who am I talking to? | Introduce yourself.
        """,
    "I answer short questions about pictures, videos and sounds of simple things.": """
        What can you do? | What do you know? | What can I ask you? | What can I ask? | How can you help me? | Help! | Help |
        What are you good at? | What should I ask?
        """,
    "I was trained on synthetic data that mmrt makes from a seed.": """
        Who made you? | Who trained you? | Where do you come from? | Who built you? | How were you trained? |
        What were you trained on? | What is your training data? | How were you made?
        """,
    "No, I am a small program.": """
        Are you a human? | Are you a person? | Are you real? | Are you alive? | Are you a robot? | Am I talking to a human? |
        Are you a machine? | Do you have feelings?
        """,
    "I am very small: a few million parameters.": """
        Are you big? | How big are you? | How many parameters do you have? | What size are you? | Are you a large model? |
        Are you small? | How large are you? | How small are you?
        """,
    "I can be wrong. I am very small.": """
        Can you be wrong? | Do you make mistakes? | Are you always right? | Can I trust you? | Are your answers true? |
        Is that true? | Are you sure? | Do you ever make mistakes?
        """,
    "Circle, square, triangle, star, cross and heart.": """
        Which shapes do you know? | What shapes do you know? | What shapes can you name? | Which shapes do you recognise? |
        Name the shapes that you know. | Which shapes can you name? | List the shapes that you know. |
        Tell me the shapes that you know.
        """,
    "Red, orange, yellow, green, blue, purple, white and black.": """
        Which colours do you know? | What colours do you know? | Which colors do you know? | What colors do you know? |
        Which colours can you name? | Name the colours that you know. | List the colours that you know. |
        Tell me the colours that you know.
        """,
    "Yes. Send me a picture and ask about it.": """
        Can you see? | Can you see pictures? | Can you look at images? | Do you understand images? | Can I show you a picture? |
        Can you read images? | Can I send you an image? | Do you take pictures?
        """,
    "Yes. Send me a sound and ask about it.": """
        Can you hear? | Can you hear sounds? | Can you listen to audio? | Do you understand sound? | Can I play you a sound? |
        Can I send you a sound? | Do you take audio? | Can I send you audio?
        """,
    "Yes. Send me a video and ask about it.": """
        Can you watch videos? | Can you see videos? | Do you understand video? | Can I show you a video? | Can I send you a video? |
        Do you take videos? | Can you look at a video? | Can I send a clip?
        """,
    "No. I only write text.": """
        Can you speak? | Can you talk? | Can you draw? | Can you make pictures? | Do you make sounds? | Can you sing? |
        Can you make videos? | Can you say it aloud?
        """,
    "I count up to five and read up to four digits.": """
        Can you count? | How far can you count? | Can you count things? | Up to what number can you count? | Do you know numbers? |
        Can you read numbers? | Can you read digits? | How many things can you count?
        """,
    "I only know a little English.": """
        What languages do you speak? | Do you speak English? | Which languages do you know? | Do you speak German? |
        Which language do you speak? | Do you know French? | Can you speak Spanish? | In which language can I ask?
        """,
}

_FACTS = {
    "mmrt serves multimodal language models on one machine.": """
        What is mmrt? | What does mmrt do? | Tell me about mmrt. | What is mmrt for? | Explain mmrt. | What is this server? |
        What is this program? | Describe mmrt.
        """,
    "Text, image, video and audio in, text out.": """
        What goes in and what comes out? | What goes into mmrt? | What does mmrt take? | What can I send to mmrt? |
        What media does mmrt take? | Which media does mmrt know? | What input does mmrt take? | What are the inputs of mmrt?
        """,
    "mmrt is a multimodal runtime.": """
        What does mmrt mean? | What does the name mmrt mean? | What does mmrt stand for? | Why is it called mmrt? |
        What is mmrt short for? | What is the long name of mmrt? | What do the letters mmrt mean? | Spell out mmrt.
        """,
    "Run mmrt up.": """
        How do I start mmrt? | How do I start the server? | How do I run mmrt? | What starts mmrt? | Which command starts mmrt? |
        How can I start mmrt? | How does mmrt start? | How do I start it?
        """,
    "Run mmrt down.": """
        How do I stop mmrt? | How do I stop the server? | How do I end mmrt? | What stops mmrt? | Which command stops mmrt? |
        How can I stop mmrt? | How do I shut it down? | How do I stop it?
        """,
    "Run mmrt ask with your question and a file.": """
        How do I ask a question? | How do I ask mmrt? | Which command asks a question? | How do I ask in the terminal? |
        How can I ask mmrt a question? | How do I send a question? | How do I show mmrt a picture? | How do I ask about a picture?
        """,
    "Run mmrt status.": """
        How do I see the status? | Which command shows the status? | How do I see what runs? | How do I see the state of mmrt? |
        How can I see the processes? | What shows the status? | How do I know that mmrt runs? | Is mmrt running?
        """,
    "Run mmrt logs.": """
        How do I see the logs? | Where are the logs? | Which command shows the logs? | How do I read the logs? |
        How can I see the logs? | Where do I find the logs? | What do the processes print? | What shows the logs?
        """,
    "Run mmrt restart and the name of the actor. Streams go on.": """
        How do I restart an actor? | How do I restart a process? | Which command restarts an actor? | How do I restart a stage? |
        How can I load new code? | How can I restart an actor? | How do I replace a process? | What does mmrt restart do?
        """,
    "Run mmrt up with --model and a directory.": """
        How do I use another model? | How do I load a model? | How do I change the model? | How do I run my own model? |
        How can I use a bigger model? | Can I use another model? | How do I serve another model? | How do I choose the model?
        """,
    "Qwen2.5-VL and Qwen2.5-Omni.": """
        Which models does mmrt serve? | Which models can I use? | Which models does mmrt know? | What models does mmrt run? |
        What models can mmrt load? | Does mmrt run Qwen? | Which checkpoints can mmrt load? | Which model families does mmrt know?
        """,
    "Run mmrt model make. Its weights are random.": """
        How do I make a test model? | How do I make a model? | How do I make a random model? |
        What makes a random model? | Which command makes a model? | What does mmrt model make do? |
        Can mmrt make a model? | How can I make a checkpoint?
        """,
    "Run mmrt bench serve and see.": """
        How do I measure the speed? | How fast is mmrt? | How do I measure mmrt? | How do I load the server? |
        How do I test the speed? | What does mmrt bench do? | Which command measures speed? | Is mmrt fast?
        """,
    "Run mmrt config show.": """
        How do I see the configuration? | How do I show the configuration? | Which command shows the configuration? |
        What is the configuration? | How can I see the settings? | Where are the settings? | What are the settings? |
        How do I see my settings?
        """,
    "Run mmrt config check with the file.": """
        How do I check a configuration? | How do I check my configuration file? | Which command checks a configuration? |
        Is my configuration right? | How can I check my settings? | What is wrong with my configuration? |
        How do I test a configuration? | What checks the configuration?
        """,
    "With one TOML file.": """
        How do I configure mmrt? | What format has the configuration? | How is mmrt configured? |
        What kind of file is the configuration? | How do I write a configuration? | How do I change a setting? |
        How can I configure the server? | What configures mmrt?
        """,
    "It listens on 127.0.0.1, port 8000.": """
        Which port does mmrt use? | What is the port? | Which port is it? | At which port is the server? |
        What port does the server listen on? | Where does the server listen? | Which port do I connect to? |
        What is the address of the server?
        """,
    "It speaks the chat completions API of OpenAI.": """
        Which API does mmrt have? | What is the API? | Which clients work with mmrt? | Can I use the OpenAI client? |
        How do I talk to mmrt from Python? | What client do I need? | Is there an API? | Does mmrt speak the OpenAI API?
        """,
    "It runs on the CPU. On CUDA it has not been tried.": """
        Does mmrt need a GPU? | Does mmrt use a GPU? | Do I need a GPU? | Does mmrt run on the CPU? | Can mmrt use CUDA? |
        Can I run mmrt without a GPU? | Which hardware does mmrt need? | What does mmrt run on?
        """,
    "Linux and Python 3.11 or newer.": """
        Which system does mmrt need? | Does mmrt run on Linux? | Does mmrt run on Windows? | Which operating system do I need? |
        What does mmrt need? | Which Python does mmrt need? | Where does mmrt run? | What do I need to run mmrt?
        """,
    "One machine.": """
        How many machines does mmrt use? | Does mmrt run on many machines? | Is mmrt distributed? | Can mmrt use two machines? |
        On how many machines does mmrt run? | Does mmrt scale to many machines? | How many computers do I need? |
        Can I use many machines?
        """,
    "An actor is a process that does one stage.": """
        What is an actor? | What are actors? | What is a stage? | What does an actor do? | Explain actors. | What does actor mean? |
        What do you call an actor? | Tell me about actors.
        """,
    "Memory, controller, gateway, video, encoder, prefill, decode and detokenizer.": """
        Which actors are there? | Name the actors. | What are the actors of mmrt? | Which processes does mmrt have? |
        List the actors. | What are the stages? | Which stages are there? | What are the processes of mmrt?
        """,
    "Eight actors.": """
        How many actors are there? | How many actors does mmrt have? | How many processes are there? | How many stages are there? |
        How many stages does mmrt have? | How many processes does mmrt have? | What is the number of actors? | Count the actors.
        """,
    "Memory makes the pools and loads the weights once.": """
        What does the memory actor do? | What is the memory actor? | What is memory for? | What does memory do? |
        Who makes the pools? | Who loads the weights? | Which actor loads the weights? | What is the job of memory?
        """,
    "The controller admits requests, gives out pages and makes plans.": """
        What does the controller do? | What is the controller? | What is the controller for? | Who makes the plans? |
        Which actor makes the plans? | Who allocates pages? | What is the job of the controller? | Tell me about the controller.
        """,
    "The gateway speaks HTTP and makes tokens of text.": """
        What does the gateway do? | What is the gateway? | What is the gateway for? | Who speaks HTTP? | Which actor speaks HTTP? |
        Which actor talks to clients? | What is the job of the gateway? | Tell me about the gateway.
        """,
    "The video actor decodes images, videos and sounds.": """
        What does the video actor do? | What is the video actor? | What is the video actor for? | Who decodes media? |
        Which actor decodes images? | Which actor decodes videos? | What is the job of the video actor? |
        Tell me about the video actor.
        """,
    "The encoder runs the towers for vision and sound.": """
        What does the encoder do? | What is the encoder? | What is the encoder for? | Who runs the towers? |
        Which actor runs the towers? | Who makes embeddings? | What is the job of the encoder? | Tell me about the encoder.
        """,
    "Prefill runs the model over the prompt in chunks.": """
        What does prefill do? | What is prefill? | What is prefill for? | What is the prefill actor? | Who reads the prompt? |
        Which actor reads the prompt? | What is the job of prefill? | Tell me about prefill.
        """,
    "Decode samples the tokens of all requests in one batch.": """
        What does decode do? | What is decode? | What is decode for? | What is the decode actor? | Who samples tokens? |
        Which actor makes the tokens? | What is the job of decode? | Tell me about decode.
        """,
    "The detokenizer turns tokens into text.": """
        What does the detokenizer do? | What is the detokenizer? | What is the detokenizer for? | Who makes text of tokens? |
        Which actor makes the text? | Who turns tokens into text? | What is the job of the detokenizer? |
        Tell me about the detokenizer.
        """,
    "The supervisor starts, watches and restarts the actors.": """
        What does the supervisor do? | What is the supervisor? | What is the supervisor for? | Who restarts actors? |
        Who starts the actors? | Who watches the actors? | What is the job of the supervisor? | Tell me about the supervisor.
        """,
    "A new one starts, and the text goes on where it was.": """
        What happens when an actor dies? | What happens when I kill an actor? | What happens if a process dies? |
        What if decode dies? | Can I kill an actor? | What happens after a crash? | Is mmrt robust? | Does a crash lose requests?
        """,
    "Its connections are lost and their requests are cancelled.": """
        What happens when the gateway dies? | What if the gateway dies? | Can I kill the gateway? |
        What does a crash of the gateway cost? | What happens if I kill the gateway? | Which crash loses connections? |
        Do connections live when the gateway dies? | What if I kill the gateway?
        """,
    "A page is the unit of a pool. A KV page holds 16 tokens.": """
        What is a page? | What are pages? | What is a page in mmrt? | What does page mean? | Explain pages. | Tell me about pages. |
        How large is a page? | How many tokens has a KV page?
        """,
    "Pools hold pages: media, patch, embedding and KV.": """
        What is a pool? | What are the pools? | Which pools are there? | Name the pools. | List the pools. | Tell me about pools. |
        How many pools are there? | What does pool mean?
        """,
    "A plan is work for video, encoder or prefill.": """
        What is a plan? | What are plans? | What does plan mean? | What is a plan in mmrt? | Explain plans. | Tell me about plans. |
        What is in a plan? | Who gets plans?
        """,
    "A ring is a queue in shared memory.": """
        What is a ring? | What are rings? | What does ring mean? | What is a ring in mmrt? | Explain rings. | Tell me about rings. |
        What are the rings for? | Which rings are there?
        """,
    "The journal holds the definitions and ends of requests.": """
        What is the journal? | What is the journal for? | What is in the journal? | What does journal mean? | Explain the journal. |
        Tell me about the journal. | Who writes the journal? | Why is there a journal?
        """,
    "Who holds the role lock of an actor may write.": """
        What is a role lock? | What are role locks? | What does role lock mean? | What is the role lock for? | Explain role locks. |
        Tell me about role locks. | Who may write? | How do you know that an actor is dead?
        """,
    "A standby has loaded everything and waits for the role lock.": """
        What is a standby? | What does standby mean? | What is a standby for? | Explain standby. | Tell me about standbys. |
        What does a standby do? | What waits for the role lock? | How does a hot restart work?
        """,
    "A doorbell wakes an actor and says nothing.": """
        What is a doorbell? | What are doorbells? | What does doorbell mean? | What is a doorbell for? | Explain doorbells. |
        Tell me about doorbells. | What wakes an actor? | How are actors woken?
        """,
    "The zygote has imported torch and forks actors.": """
        What is a zygote? | What does zygote mean? | What is the zygote? | What is the zygote for? | Explain the zygote. |
        Tell me about the zygote. | Who forks the actors? | Why do actors start fast?
        """,
    "A tower is the network for vision or for sound.": """
        What is a tower? | What are towers? | What does tower mean? | What is a tower for? | Explain towers. | Tell me about towers.
        | Which towers are there? | What makes embeddings of media?
        """,
    "An embedding stands for a token of media.": """
        What is an embedding? | What are embeddings? | What does embedding mean? | Explain embeddings. | Tell me about embeddings. |
        What is an embedding for? | What does a tower make? | What does the model take for media?
        """,
    "The bus carries messages over ZeroMQ.": """
        What is the bus? | What does the bus do? | What is the bus for? | How do actors talk? | How do the processes talk? |
        Explain the bus. | Tell me about the bus. | What carries the messages?
        """,
    "Everything that matters lies in shared memory.": """
        What is shared memory for? | What is in shared memory? | Where does mmrt keep its data? | What is the truth in mmrt? |
        Why shared memory? | Where is the data? | Where are the tokens? | What survives a crash?
        """,
    "TTFT is the time to the first token.": """
        What is TTFT? | What does TTFT mean? | What does TTFT stand for? | Explain TTFT. | What is the time to first token? | TTFT?
        | What do you call TTFT? | Tell me about TTFT.
        """,
    "TBT is the time between tokens.": """
        What is TBT? | What does TBT mean? | What does TBT stand for? | Explain TBT. | What is the time between tokens? | TBT? |
        What do you call TBT? | Tell me about TBT.
        """,
    "Guidance pushes the answer away from the companion prompt.": """
        What is CFG? | What does CFG mean? | What is guidance? | What is classifier-free guidance? | What does guidance_scale do? |
        Explain guidance. | Tell me about guidance. | What is the guidance scale?
        """,
    "The companion is the prompt without media, for guidance.": """
        What is a companion? | What does companion mean? | What is the companion prompt? | What is a negative prompt? |
        Explain the companion. | Tell me about companions. | What is the companion for? | What does the negative prompt do?
        """,
    "A token is a piece of text.": """
        What is a token? | What are tokens? | What does token mean? | Explain tokens. | Tell me about tokens. | What is a token for?
        | What is text made of? | What do models read?
        """,
    "Apache 2.0.": """
        What is the license? | Which license does mmrt have? | Is mmrt free? | Is mmrt open source? | May I use mmrt? |
        What is the license of mmrt? | Under which license is mmrt? | Can I use mmrt for free?
        """,
    "Run mmrt version.": """
        Which version is this? | What version are you? | Which version of mmrt is this? | What is the version of mmrt? |
        How do I see the version? | What version is it? | Which version do I have? | What shows the version?
        """,
    "JPEG, PNG, WebP, GIF and BMP.": """
        Which image formats do you know? | Which images can I send? | What image formats can I use? | Can I send a PNG? |
        Can I send a JPEG? | Which pictures does mmrt read? | What kind of images can mmrt read? |
        Which formats of images are there?
        """,
    "WAV, MP3, FLAC, Ogg, Opus, M4A, AAC and WebM.": """
        Which audio formats do you know? | Which sounds can I send? | What audio formats can I use? | Can I send a WAV? |
        Can I send an MP3? | Which sounds does mmrt read? | What kind of audio can mmrt read? | Which formats of sound are there?
        """,
    "MP4, MOV, WebM, Matroska, AVI and more.": """
        Which video formats do you know? | Which videos can I send? | What video formats can I use? | Can I send an MP4? |
        Can I send a WebM? | Which videos does mmrt read? | What kind of video can mmrt read? | Which formats of video are there?
        """,
    "Two frames per second.": """
        How many frames do you see? | How many frames per second do you see? | At which rate are videos sampled? |
        How is a video sampled? | How many frames of a video are used? | What is the frame rate? | Do you see every frame? |
        How often do you look at a video?
        """,
    "No. Media are sent as data URLs.": """
        Can I send a link? | Can I send a URL? | Does mmrt load pictures from the web? | Can mmrt download an image? |
        Can I use a web address? | Does mmrt fetch remote media? | Do you read links? | Can I send a web page?
        """,
    "No message of mmrt is a pickle.": """
        Does mmrt use pickle? | Is there pickle in mmrt? | Do you use pickle? | How are messages written? | What about pickle? |
        Is pickle used? | Why no pickle? | Does anything use pickle?
        """,
    "Run mmrt units.": """
        Can I use systemd? | Does mmrt work with systemd? | How do I make systemd units? | Are there systemd units? |
        Which command writes units? | What does mmrt units do? | How do I use systemd? | How do I run mmrt as a service?
        """,
    "Read the README and docs.": """
        Where is the documentation? | Where can I read more? | Where are the docs? | Is there documentation? |
        How do I learn about mmrt? | Where do I read about mmrt? | What should I read? | Is there a manual?
        """,
}


def _parsed(table: dict[str, str]) -> tuple[tuple[tuple[str, ...], str], ...]:
    return tuple(
        (tuple(" ".join(question.split()) for question in questions.split("|")), answer) for answer, questions in table.items()
    )


GREETINGS = _parsed(_GREETINGS)
FACTS = _parsed(_FACTS)
