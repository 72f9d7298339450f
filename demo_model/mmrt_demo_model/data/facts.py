"""What the demo model knows about mmrt: the answer, and ways to ask. True of this version; see README.md and docs/."""

from .kinds import alternatives

FACTS = alternatives(
    {
        "mmrt serves multimodal language models on one machine.": """
        What is mmrt? | What does mmrt do? | Tell me about mmrt. | What is mmrt for? | Explain mmrt. | What is this server? | What
        is this program? | Describe mmrt. | What's mmrt? | mmrt? | Can you explain mmrt? | What is mmrt used for? | What's the
        purpose of mmrt? | Give me a short summary of mmrt.
        """,
        "Text, image, video and audio in, text out.": """
        What goes in and what comes out? | What goes into mmrt? | What does mmrt take? | What can I send to mmrt? | What media does
        mmrt take? | Which media does mmrt know? | What input does mmrt take? | What are the inputs of mmrt? | What are mmrt's
        inputs and outputs? | What kinds of input does mmrt accept? | Which modalities does mmrt support? | What can I feed into
        mmrt? | What's the input and output of mmrt? | mmrt input types?
        """,
        "mmrt is a multimodal runtime.": """
        What does mmrt mean? | What does the name mmrt mean? | What does mmrt stand for? | Why is it called mmrt? | What is mmrt
        short for? | What is the long name of mmrt? | What do the letters mmrt mean? | Spell out mmrt. | What's mmrt short for? |
        What does MMRT abbreviate? | What's the full name of mmrt? | Meaning of the name mmrt? | Where does the name mmrt come from?
        | What do the letters in mmrt stand for?
        """,
        "Run mmrt up.": """
        How do I start mmrt? | How do I start the server? | How do I run mmrt? | What starts mmrt? | Which command starts mmrt? |
        How can I start mmrt? | How does mmrt start? | How do I start it? | How to start mmrt? | What's the command to start mmrt? |
        Start the server, how? | How do I bring mmrt up? | How do I launch mmrt? | Command to launch the server?
        """,
        "Run mmrt down.": """
        How do I stop mmrt? | How do I stop the server? | How do I end mmrt? | What stops mmrt? | Which command stops mmrt? | How
        can I stop mmrt? | How do I shut it down? | How do I stop it? | How to stop mmrt? | What's the command to stop mmrt? | How
        do I shut down the server? | How do I bring mmrt down? | How do I quit mmrt? | Command to shut down the server?
        """,
        "Run mmrt ask with your question and a file.": """
        How do I ask a question? | How do I ask mmrt? | Which command asks a question? | How do I ask in the terminal? | How can I
        ask mmrt a question? | How do I send a question? | How do I show mmrt a picture? | How do I ask about a picture? | How to
        ask mmrt something? | How do I ask from the command line? | How do I query mmrt from a shell? | Command to ask a question? |
        How do I send mmrt a file and a question? | How can I ask about a file?
        """,
        "Run mmrt status.": """
        How do I see the status? | Which command shows the status? | How do I see what runs? | How do I see the state of mmrt? | How
        can I see the processes? | What shows the status? | How do I know that mmrt runs? | Is mmrt running? | How to check the
        status? | What's the command for the status? | How do I check if mmrt is up? | Is the server up? | Show me the status of the
        actors. | How can I tell whether mmrt is running?
        """,
        "Run mmrt logs.": """
        How do I see the logs? | Where are the logs? | Which command shows the logs? | How do I read the logs? | How can I see the
        logs? | Where do I find the logs? | What do the processes print? | What shows the logs? | How to view the logs? | What's the
        command for the logs? | Show me the logs. | How do I get the log output? | Where can I look at the logs? | How do I view
        what the actors log?
        """,
        "Run mmrt restart and the name of the actor. Streams go on.": """
        How do I restart an actor? | How do I restart a process? | Which command restarts an actor? | How do I restart a stage? |
        How can I load new code? | How can I restart an actor? | How do I replace a process? | What does mmrt restart do? | How to
        restart an actor? | What's the command to restart an actor? | How do I restart just one actor? | How do I restart decode? |
        Can I restart an actor without losing streams? | Restart a single process, how?
        """,
        "Run mmrt up with --model and a directory.": """
        How do I use another model? | How do I load a model? | How do I change the model? | How do I run my own model? | How can I
        use a bigger model? | Can I use another model? | How do I serve another model? | How do I choose the model? | How to load a
        different model? | How do I start mmrt with my own model? | How do I switch models? | Which option sets the model? | How do
        I point mmrt at a model directory? | How can I serve my own checkpoint?
        """,
        "Qwen2.5-VL and Qwen2.5-Omni.": """
        Which models does mmrt serve? | Which models can I use? | Which models does mmrt know? | What models does mmrt run? | What
        models can mmrt load? | Does mmrt run Qwen? | Which checkpoints can mmrt load? | Which model families does mmrt know? | What
        models are supported? | Which models does mmrt support? | List the supported models. | Supported model families? | What
        kinds of checkpoints does mmrt serve? | Which Qwen models work with mmrt?
        """,
        "Run mmrt model make. Its weights are random.": """
        How do I make a test model? | How do I make a model? | How do I make a random model? | What makes a random model? | Which
        command makes a model? | What does mmrt model make do? | Can mmrt make a model? | How can I make a checkpoint? | How to make
        a test checkpoint? | How do I create a random model? | How do I generate a model for testing? | Command to make a test
        model? | How do I get a model with random weights? | How can I create a dummy model?
        """,
        "Run mmrt bench serve and see.": """
        How do I measure the speed? | How fast is mmrt? | How do I measure mmrt? | How do I load the server? | How do I test the
        speed? | What does mmrt bench do? | Which command measures speed? | Is mmrt fast? | How to benchmark mmrt? | How do I
        benchmark the server? | What's the speed of mmrt? | How can I measure throughput? | Is there a benchmark for mmrt? | What's
        the benchmark command?
        """,
        "Run mmrt config show.": """
        How do I see the configuration? | How do I show the configuration? | Which command shows the configuration? | What is the
        configuration? | How can I see the settings? | Where are the settings? | What are the settings? | How do I see my settings?
        | How to see the config? | What's the command to show the config? | Show me the configuration. | How do I print the
        settings? | What's my current config? | How can I view the current configuration?
        """,
        "Run mmrt config check with the file.": """
        How do I check a configuration? | How do I check my configuration file? | Which command checks a configuration? | Is my
        configuration right? | How can I check my settings? | What is wrong with my configuration? | How do I test a configuration?
        | What checks the configuration? | How to check a config file? | How do I validate my config? | Is my config file valid? |
        What's the command to check a config? | Can mmrt check my configuration? | How can I verify my configuration file?
        """,
        "With one TOML file.": """
        How do I configure mmrt? | What format has the configuration? | How is mmrt configured? | What kind of file is the
        configuration? | How do I write a configuration? | How do I change a setting? | How can I configure the server? | What
        configures mmrt? | How to configure mmrt? | What's the config format? | Is the configuration YAML or TOML? | What file
        format does the config use? | How do I set options for mmrt? | What do I configure mmrt with?
        """,
        "It listens on 127.0.0.1, port 8000.": """
        Which port does mmrt use? | What is the port? | Which port is it? | At which port is the server? | What port does the server
        listen on? | Where does the server listen? | Which port do I connect to? | What is the address of the server? | What's the
        port? | What port does mmrt use? | Which address does mmrt listen on? | What's the server's address? | Default port of mmrt?
        | What host and port do I connect to?
        """,
        "It speaks the chat completions API of OpenAI.": """
        Which API does mmrt have? | What is the API? | Which clients work with mmrt? | Can I use the OpenAI client? | How do I talk
        to mmrt from Python? | What client do I need? | Is there an API? | Does mmrt speak the OpenAI API? | What API does mmrt
        speak? | What's the API of mmrt? | Is mmrt compatible with OpenAI? | Does the OpenAI client work with mmrt? | Which protocol
        do clients use? | How do I call mmrt from my code?
        """,
        "It runs on the CPU. On CUDA it has not been tried.": """
        Does mmrt need a GPU? | Does mmrt use a GPU? | Do I need a GPU? | Does mmrt run on the CPU? | Can mmrt use CUDA? | Can I run
        mmrt without a GPU? | Which hardware does mmrt need? | What does mmrt run on? | Is a GPU required? | Will mmrt run without a
        GPU? | CPU or GPU? | Does mmrt support CUDA? | Has mmrt been tried on CUDA? | What hardware do I need for mmrt?
        """,
        "Linux and Python 3.11 or newer.": """
        Which system does mmrt need? | Does mmrt run on Linux? | Does mmrt run on Windows? | Which operating system do I need? |
        What does mmrt need? | Which Python does mmrt need? | Where does mmrt run? | What do I need to run mmrt? | What are the
        requirements of mmrt? | What OS does mmrt need? | Which version of Python do I need? | Minimum Python version? | What are
        mmrt's system requirements? | Which platform does mmrt run on?
        """,
        "One machine.": """
        How many machines does mmrt use? | Does mmrt run on many machines? | Is mmrt distributed? | Can mmrt use two machines? | On
        how many machines does mmrt run? | Does mmrt scale to many machines? | How many computers do I need? | Can I use many
        machines? | Can mmrt run on a cluster? | Does mmrt span several nodes? | Is mmrt for one machine or many? | How many servers
        do I need for mmrt? | How many hosts does mmrt run on? | One machine or several?
        """,
        "An actor is a process that does one stage.": """
        What is an actor? | What are actors? | What is a stage? | What does an actor do? | Explain actors. | What does actor mean? |
        What do you call an actor? | Tell me about actors. | What's an actor? | Define actor. | What exactly is an actor in mmrt? |
        Can you explain what an actor is? | What is meant by an actor? | Actor meaning?
        """,
        "Memory, controller, gateway, video, encoder, prefill, decode and detokenizer.": """
        Which actors are there? | Name the actors. | What are the actors of mmrt? | Which processes does mmrt have? | List the
        actors. | What are the stages? | Which stages are there? | What are the processes of mmrt? | What actors does mmrt have? |
        What are all the actors? | Give me a list of the actors. | Tell me the names of the actors. | List all processes of mmrt. |
        Which actors does mmrt run?
        """,
        "Eight actors.": """
        How many actors are there? | How many actors does mmrt have? | How many processes are there? | How many stages are there? |
        How many stages does mmrt have? | How many processes does mmrt have? | What is the number of actors? | Count the actors. |
        Number of actors? | How many actors run in mmrt? | How many actors is mmrt made of? | What's the actor count? | Into how
        many actors is mmrt split? | Tell me how many actors there are.
        """,
        "Memory makes the pools and loads the weights once.": """
        What does the memory actor do? | What is the memory actor? | What is memory for? | What does memory do? | Who makes the
        pools? | Who loads the weights? | Which actor loads the weights? | What is the job of memory? | What's the memory actor for?
        | Explain the memory actor. | What's the role of the memory actor? | Which actor makes the pools? | Which process loads the
        weights? | Tell me about the memory actor.
        """,
        "The controller admits requests, gives out pages and makes plans.": """
        What does the controller do? | What is the controller? | What is the controller for? | Who makes the plans? | Which actor
        makes the plans? | Who allocates pages? | What is the job of the controller? | Tell me about the controller. | What's the
        controller? | Explain the controller. | What's the role of the controller? | Who admits requests? | Which actor gives out
        pages? | What does the controller actor do?
        """,
        "The gateway speaks HTTP and makes tokens of text.": """
        What does the gateway do? | What is the gateway? | What is the gateway for? | Who speaks HTTP? | Which actor speaks HTTP? |
        Which actor talks to clients? | What is the job of the gateway? | Tell me about the gateway. | What's the gateway? | Explain
        the gateway. | What's the role of the gateway? | Which process handles HTTP? | Who turns text into tokens? | What does the
        gateway actor do?
        """,
        "The video actor decodes images, videos and sounds.": """
        What does the video actor do? | What is the video actor? | What is the video actor for? | Who decodes media? | Which actor
        decodes images? | Which actor decodes videos? | What is the job of the video actor? | Tell me about the video actor. |
        What's the video actor? | Explain the video actor. | What's the role of the video actor? | Which process decodes media? |
        Who decodes the images and sounds? | Which actor decodes sounds?
        """,
        "The encoder runs the towers for vision and sound.": """
        What does the encoder do? | What is the encoder? | What is the encoder for? | Who runs the towers? | Which actor runs the
        towers? | Who makes embeddings? | What is the job of the encoder? | Tell me about the encoder. | What's the encoder? |
        Explain the encoder. | What's the role of the encoder? | Which process runs the towers? | Where do the towers run? | What
        does the encoder actor do?
        """,
        "Prefill runs the model over the prompt in chunks.": """
        What does prefill do? | What is prefill? | What is prefill for? | What is the prefill actor? | Who reads the prompt? | Which
        actor reads the prompt? | What is the job of prefill? | Tell me about prefill. | What's prefill? | Explain prefill. | What's
        the role of prefill? | Who processes the prompt? | Which process handles the prompt? | What does the prefill actor do?
        """,
        "Decode samples the tokens of all requests in one batch.": """
        What does decode do? | What is decode? | What is decode for? | What is the decode actor? | Who samples tokens? | Which actor
        makes the tokens? | What is the job of decode? | Tell me about decode. | What's decode? | Explain decode. | What's the role
        of decode? | Which actor samples tokens? | Who generates the tokens? | What does the decode actor do?
        """,
        "The detokenizer turns tokens into text.": """
        What does the detokenizer do? | What is the detokenizer? | What is the detokenizer for? | Who makes text of tokens? | Which
        actor makes the text? | Who turns tokens into text? | What is the job of the detokenizer? | Tell me about the detokenizer. |
        What's the detokenizer? | Explain the detokenizer. | What's the role of the detokenizer? | Which actor turns tokens into
        text? | How do tokens become text? | What does the detokenizer actor do?
        """,
        "The supervisor starts, watches and restarts the actors.": """
        What does the supervisor do? | What is the supervisor? | What is the supervisor for? | Who restarts actors? | Who starts the
        actors? | Who watches the actors? | What is the job of the supervisor? | Tell me about the supervisor. | What's the
        supervisor? | Explain the supervisor. | What's the role of the supervisor? | Which process restarts the actors? | Who looks
        after the actors? | What starts and watches the actors?
        """,
        "A new one starts, and the text goes on where it was.": """
        What happens when an actor dies? | What happens when I kill an actor? | What happens if a process dies? | What if decode
        dies? | Can I kill an actor? | What happens after a crash? | Is mmrt robust? | Does a crash lose requests? | What if an
        actor crashes? | What happens when decode crashes? | What happens if I kill decode? | What if I kill an actor? | Does the
        text go on after decode crashes? | How does mmrt recover when decode dies?
        """,
        "Its connections are lost and their requests are cancelled.": """
        What happens when the gateway dies? | What if the gateway dies? | Can I kill the gateway? | What does a crash of the gateway
        cost? | What happens if I kill the gateway? | Which crash loses connections? | Do connections live when the gateway dies? |
        What if I kill the gateway? | What happens if the gateway crashes? | What if the gateway goes down? | What happens to
        clients if the gateway dies? | What's lost when the gateway dies? | Do requests survive a gateway crash? | Effect of killing
        the gateway?
        """,
        "A page is the unit of a pool. A KV page holds 16 tokens.": """
        What is a page? | What are pages? | What is a page in mmrt? | What does page mean? | Explain pages. | Tell me about pages. |
        How large is a page? | How many tokens has a KV page? | What's a page? | Define page. | How big is a KV page? | How many
        tokens fit in a KV page? | What's the size of a KV page? | What is a KV page?
        """,
        "Pools hold pages: media, patch, embedding and KV.": """
        What is a pool? | What are the pools? | Which pools are there? | Name the pools. | List the pools. | Tell me about pools. |
        How many pools are there? | What does pool mean? | What's a pool? | Define pool. | Explain pools. | What pools does mmrt
        have? | What do the pools hold? | Can you list the pools of mmrt?
        """,
        "A plan is work for video, encoder or prefill.": """
        What is a plan? | What are plans? | What does plan mean? | What is a plan in mmrt? | Explain plans. | Tell me about plans. |
        What is in a plan? | Who gets plans? | What's a plan in mmrt? | Define plan. | What is meant by a plan? | What are the plans
        of the controller? | Which actors get plans? | Can you explain what a plan is?
        """,
        "A ring is a queue in shared memory.": """
        What is a ring? | What are rings? | What does ring mean? | What is a ring in mmrt? | Explain rings. | Tell me about rings. |
        What are the rings for? | Which rings are there? | What's a ring in mmrt? | Define ring. | What is meant by a ring? | Can
        you explain what a ring is? | What's a ring used for in mmrt? | What kind of queue is a ring?
        """,
        "The journal holds the definitions and ends of requests.": """
        What is the journal? | What is the journal for? | What is in the journal? | What does journal mean? | Explain the journal. |
        Tell me about the journal. | Who writes the journal? | Why is there a journal? | What's the journal? | Define journal. |
        What does the journal hold? | What's written in the journal? | What does mmrt keep in the journal? | Can you explain the
        journal?
        """,
        "Who holds the role lock of an actor may write.": """
        What is a role lock? | What are role locks? | What does role lock mean? | What is the role lock for? | Explain role locks. |
        Tell me about role locks. | Who may write? | How do you know that an actor is dead? | What's a role lock? | Define role
        lock. | What does a role lock do? | Can you explain role locks? | Who is allowed to write for an actor? | Why are there role
        locks?
        """,
        "A standby has loaded everything and waits for the role lock.": """
        What is a standby? | What does standby mean? | What is a standby for? | Explain standby. | Tell me about standbys. | What
        does a standby do? | What waits for the role lock? | How does a hot restart work? | What's a standby? | Define standby. |
        What is a standby process? | Can you explain what a standby is? | What does a standby wait for? | Why have a standby?
        """,
        "A doorbell wakes an actor and says nothing.": """
        What is a doorbell? | What are doorbells? | What does doorbell mean? | What is a doorbell for? | Explain doorbells. | Tell
        me about doorbells. | What wakes an actor? | How are actors woken? | What's a doorbell in mmrt? | Define doorbell. | What
        does a doorbell do? | Can you explain doorbells? | How does an actor get woken up? | What do doorbells say?
        """,
        "The zygote has imported torch and forks actors.": """
        What is a zygote? | What does zygote mean? | What is the zygote? | What is the zygote for? | Explain the zygote. | Tell me
        about the zygote. | Who forks the actors? | Why do actors start fast? | What's the zygote? | Define zygote. | What does the
        zygote do? | Can you explain the zygote? | Which process forks the actors? | Why is there a zygote?
        """,
        "A tower is the network for vision or for sound.": """
        What is a tower? | What are towers? | What does tower mean? | What is a tower for? | Explain towers. | Tell me about towers.
        | Which towers are there? | What makes embeddings of media? | What's a tower in mmrt? | Define tower. | What does a tower
        do? | Can you explain what a tower is? | What is meant by a tower? | What's a vision tower?
        """,
        "An embedding stands for a token of media.": """
        What is an embedding? | What are embeddings? | What does embedding mean? | Explain embeddings. | Tell me about embeddings. |
        What is an embedding for? | What does a tower make? | What does the model take for media? | What's an embedding? | Define
        embedding. | Can you explain embeddings? | What does an embedding stand for? | What is meant by an embedding? | Embedding
        meaning?
        """,
        "The bus carries messages over ZeroMQ.": """
        What is the bus? | What does the bus do? | What is the bus for? | How do actors talk? | How do the processes talk? | Explain
        the bus. | Tell me about the bus. | What carries the messages? | What's the bus in mmrt? | What does mmrt use ZeroMQ for? |
        How are messages carried? | How do actors send messages? | What is the bus in mmrt? | How do actors communicate?
        """,
        "Everything that matters lies in shared memory.": """
        What is shared memory for? | What is in shared memory? | Where does mmrt keep its data? | What is the truth in mmrt? | Why
        shared memory? | Where is the data? | Where are the tokens? | What survives a crash? | What lies in shared memory? | What
        does mmrt keep in shared memory? | Where does mmrt store its state? | Where's the state kept? | What's shared memory used
        for? | Where does mmrt hold everything?
        """,
        "TTFT is the time to the first token.": """
        What is TTFT? | What does TTFT mean? | What does TTFT stand for? | Explain TTFT. | What is the time to first token? | TTFT?
        | What do you call TTFT? | Tell me about TTFT. | What's TTFT? | Define TTFT. | TTFT meaning? | What is meant by TTFT? | Can
        you explain TTFT? | What's TTFT short for?
        """,
        "TBT is the time between tokens.": """
        What is TBT? | What does TBT mean? | What does TBT stand for? | Explain TBT. | What is the time between tokens? | TBT? |
        What do you call TBT? | Tell me about TBT. | What's TBT? | Define TBT. | TBT meaning? | What is meant by TBT? | Can you
        explain TBT? | What's TBT short for?
        """,
        "Guidance pushes the answer away from the companion prompt.": """
        What is CFG? | What does CFG mean? | What is guidance? | What is classifier-free guidance? | What does guidance_scale do? |
        Explain guidance. | Tell me about guidance. | What is the guidance scale? | What's CFG? | What's guidance? | Explain CFG. |
        What does guidance do? | How does guidance work? | What is guidance_scale for?
        """,
        "The companion is the prompt without media, for guidance.": """
        What is a companion? | What does companion mean? | What is the companion prompt? | What is a negative prompt? | Explain the
        companion. | Tell me about companions. | What is the companion for? | What does the negative prompt do? | What's the
        companion? | Define companion. | What's a companion prompt? | Can you explain the companion? | What's a negative prompt? |
        Which prompt does guidance compare with?
        """,
        "A token is a piece of text.": """
        What is a token? | What are tokens? | What does token mean? | Explain tokens. | Tell me about tokens. | What is a token for?
        | What is text made of? | What do models read? | What's a token? | Define token. | Can you explain what a token is? | What
        is meant by a token? | Token meaning? | What exactly is a token?
        """,
        "Apache 2.0.": """
        What is the license? | Which license does mmrt have? | Is mmrt free? | Is mmrt open source? | May I use mmrt? | What is the
        license of mmrt? | Under which license is mmrt? | Can I use mmrt for free? | What's the license? | mmrt license? | How is
        mmrt licensed? | What licence does mmrt use? | What's mmrt's licence? | Tell me the license of mmrt.
        """,
        "Run mmrt version.": """
        Which version is this? | What version are you? | Which version of mmrt is this? | What is the version of mmrt? | How do I
        see the version? | What version is it? | Which version do I have? | What shows the version? | What's the version? | How do I
        check the version? | What version of mmrt do I have? | What's the command for the version? | Show me the version. | mmrt
        version number?
        """,
        "JPEG, PNG, WebP, GIF and BMP.": """
        Which image formats do you know? | Which images can I send? | What image formats can I use? | Can I send a PNG? | Can I send
        a JPEG? | Which pictures does mmrt read? | What kind of images can mmrt read? | Which formats of images are there? | What
        image formats are supported? | Which image types does mmrt accept? | List the image formats. | Supported image formats? |
        Which picture formats work? | What image file types can I use?
        """,
        "WAV, MP3, FLAC, Ogg, Opus, M4A, AAC and WebM.": """
        Which audio formats do you know? | Which sounds can I send? | What audio formats can I use? | Can I send a WAV? | Can I send
        an MP3? | Which sounds does mmrt read? | What kind of audio can mmrt read? | Which formats of sound are there? | What audio
        formats are supported? | Which audio types does mmrt accept? | List the audio formats. | Supported audio formats? | Which
        sound formats work? | What audio file types can I use?
        """,
        "MP4, MOV, WebM, Matroska, AVI and more.": """
        Which video formats do you know? | Which videos can I send? | What video formats can I use? | Can I send an MP4? | Can I
        send a WebM? | Which videos does mmrt read? | What kind of video can mmrt read? | Which formats of video are there? | What
        video formats are supported? | Which video types does mmrt accept? | List the video formats. | Supported video formats? |
        Which formats work for video? | What video file types can I use?
        """,
        "Two frames per second.": """
        How many frames do you see? | How many frames per second do you see? | At which rate are videos sampled? | How is a video
        sampled? | How many frames of a video are used? | What is the frame rate? | Do you see every frame? | How often do you look
        at a video? | How many fps does mmrt sample? | What's the sampling rate for videos? | At how many fps do you watch videos? |
        What frame rate does mmrt use? | How densely does mmrt sample videos? | How often does mmrt sample a video?
        """,
        "No. Media are sent as data URLs.": """
        Can I send a link? | Can I send a URL? | Does mmrt load pictures from the web? | Can mmrt download an image? | Can I use a
        web address? | Does mmrt fetch remote media? | Do you read links? | Can I send a web page? | Can I pass an image URL? | Can
        I give you an https link? | Does mmrt download media? | Can mmrt fetch a picture by URL? | Will mmrt open web links? | Are
        http links to images accepted?
        """,
        "No message of mmrt is a pickle.": """
        Does mmrt use pickle? | Is there pickle in mmrt? | Do you use pickle? | How are messages written? | What about pickle? | Is
        pickle used? | Why no pickle? | Does anything use pickle? | Are messages pickled? | Does mmrt send pickles? | Does mmrt
        pickle its messages? | Is pickle used for messages? | Are pickles sent between actors? | Does the bus use pickle?
        """,
        "Run mmrt units.": """
        Can I use systemd? | Does mmrt work with systemd? | How do I make systemd units? | Are there systemd units? | Which command
        writes units? | What does mmrt units do? | How do I use systemd? | How do I run mmrt as a service? | How to run mmrt with
        systemd? | How do I get systemd units for mmrt? | How do I set up mmrt as a service? | Is there systemd support? | Command
        to write systemd units? | Can mmrt be a systemd service?
        """,
        "Read the README and docs.": """
        Where is the documentation? | Where can I read more? | Where are the docs? | Is there documentation? | How do I learn about
        mmrt? | Where do I read about mmrt? | What should I read? | Is there a manual? | Where's the documentation? | Where are
        mmrt's docs? | Where can I learn more about mmrt? | How do I find out more about mmrt? | Got any docs? | Is there a README?
        """,
    }
)
