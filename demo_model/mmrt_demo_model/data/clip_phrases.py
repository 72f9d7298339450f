"""How people ask about clips and sounds, and about both together, in many wordings with slots."""

from .kinds import alternatives

CLIP_PHRASES = alternatives(
    {
        "moving": """
        What moves? | What is moving? | What moves in the video? | What is moving in the video? | Which thing moves? | Which shape
        is moving? | Which object moves in this video? | What do you see moving? | Name the thing that moves. | Tell me what moves.
        | What's moving? | What's the thing that moves here? | Could you tell me what is moving? | Identify the moving object. | The
        moving shape? | What travels across the screen? | Which figure is in motion? | Can you name the item that moves? | Spot the
        thing in motion. | Which item travels in this clip? | Give me the name of the moving thing. | Please say which object is
        moving. | What is it that moves in the footage? | I see something move, what is it?
        """,
        "video_describe": """
        What happens in the video? | What happens? | What happens in this video? | What is in the video? | What is in this video? |
        Describe the video. | Describe this video. | What does the video show? | What can you see in the video? | Tell me what
        happens. | What's happening in the video? | What's in the video? | Could you describe the video for me? | Give me a
        description of the video. | Summarize this video. | What goes on in the footage? | What does this clip show? | Please
        describe the clip. | Tell me about this video. | Explain what happens in the movie. | What is the video about? | Can you say
        what happens in this clip? | What takes place in the film? | Video description? | What does the animation contain? | I'd
        like to know what the video shows. | Watch the video and tell me what happens. | What
        is this clip of? | Describe the animation in a few words.
        """,
        "video_seen": """
        What do you see? | What can you see? | What is this? | What is happening? | Tell me what you see. | Describe what you see. |
        What is shown? | What is going on? | What do you see in the clip? | What's going on? | What's going on here? | What's
        happening here? | What's this? | What are you seeing? | Could you tell me what you see? | Please describe what you can see.
        | What do you notice? | What's on the screen? | What am I looking at? | Say what you see. | What's visible in the footage? |
        What is being shown here? | What can you spot in this film?
        """,
        "direction": """
        Which way does it move? | Which way does it go? | Which way does the {shape} move? | In which direction does it move? | In
        which direction does the {colour} {shape} move? | What direction does it move in? | What is the direction of the {shape}? |
        Where does it go? | Where does the {shape} go? | Where is the {colour} {shape} moving? | Does it move left, right, up or
        down? | Direction? | Which way? | Where's it going? | Could you tell me which way it travels? | Left, right, up or down? |
        Tell me the direction of motion. | Which direction does the object head in? | Which way's the {shape} going? | Where is the
        {shape} headed? | Is the {shape} going left, right, up or down? | Tell me where the {shape} moves to. | What direction is
        the {colour} {shape} travelling in? | Which way does the {colour} {shape} head? | Give me the direction of the {colour}
        {shape}.
        """,
        "speed": """
        How fast does it move? | How fast is it? | How fast is the {shape}? | How fast does the {colour} {shape} move? | Does it
        move fast or slow? | Is it fast or slow? | Is the {shape} fast or slow? | Is the {shape} slow or fast? | What is the speed
        of the {shape}? | Fast or slow? | Speed? | What's its speed? | Slow or fast? | Is the thing moving quickly or slowly? |
        Could you tell me how fast it goes? | Give me the speed of the object. | At what speed does it travel? | Does the {shape}
        move quickly or slowly? | What's the speed of the {shape}? | How quickly does the {shape} travel? | Tell me how fast the
        {shape} is going. | Is the {colour} {shape} moving fast or slowly? | Is the {colour} {shape} quick or slow? | Please say how
        fast the {colour} {shape} is.
        """,
        "first": """
        What appears {nth}? | What comes {nth}? | Which thing appears {nth}? | Which shape appears {nth}? | Which shape comes {nth}?
        | What do you see {nth}? | What appears {nth} in the video? | Which object appears {nth} in the video? | What is the {nth}
        thing to appear? | What is the {nth} thing in the video? | What's {nth}? | What shows up {nth}? | Which one shows up {nth}?
        | Could you tell me what appears {nth}? | The {nth} shape? | Name the {nth} object in the clip. | Tell me which thing is
        shown {nth}. | Identify the {nth} item in the footage. | What's the {nth} thing that you see? | Give me the {nth} shape to
        show up. | Which figure is the {nth} to come up? | What did the movie show {nth}? | Can you say which object we see {nth}? |
        What pops up {nth} in this film?
        """,
        "blinks": """
        How many times does it blink? | How many times does the {shape} blink? | How many times does the {colour} {shape} blink? |
        How many times does it appear? | How many times does the {shape} appear? | How many times do you see the {shape}? | How
        often does it blink? | How often does the {shape} blink? | How often does the {shape} appear in the video? | Count the
        blinks. | How many blinks are there? | Number of blinks? | What's the number of blinks? | Could you count the blinks for me?
        | Tell me how often it blinks. | How many times does it flash? | How many flashes are in the clip? | How many blinks can you
        spot? | It blinks how many times? | How many times does the {shape} flash? | Count how often the {shape} blinks. | How many
        times did the {shape} show up? | How often does the {colour} {shape} flash? | Tell me how many times the {colour} {shape}
        blinks. | Give me the number of blinks of the {colour} {shape}.
        """,
        "pitch": """
        Is the pitch high or low? | Is the sound high or low? | Is the tone high or low? | Is it high or low? | Is it a high or a
        low sound? | Is this a low or a high tone? | What is the pitch? | How high is the sound? | How high is the tone? | High or
        low? | Pitch? | What's the pitch? | Low or high? | Is it high-pitched or low-pitched? | Could you tell me if the sound is
        high or low? | Does it sound high or low? | Is the note low or high? | Tell me if the pitch is low or high. | Give me the
        pitch of the tone. | How high is the pitch? | Do you hear a high or a low note? | Does the recording have a high or low
        pitch? | Is the audio high or low in pitch? | Identify the pitch, high or low.
        """,
        "glide": """
        Does the pitch rise or fall? | Does the sound rise or fall? | Is the pitch rising, falling or steady? | Is the sound rising,
        falling or steady? | Is the tone rising or falling? | Does the tone go up or down? | How does the pitch change? | How does
        the sound change? | What does the pitch do? | Does it go up, go down or stay the same? | Rising, falling or steady? | What's
        the pitch doing? | Is it rising or falling? | Does the note climb, drop or hold? | Could you tell me how the pitch moves? |
        Tell me if the tone rises, falls or stays steady. | Is the pitch going up, going down or level? | Up, down or steady pitch?
        | Does the sound get higher or lower? | Does the tone get higher, lower or stay the same? | In the recording, does the pitch
        go up or down? | Which way does the pitch go? | Say if the sound is going up or down. | How does the tone change over time?
        """,
        "beeps": """
        How many beeps are there? | How many beeps do you hear? | How many beeps can you hear? | How many beeps are in the sound? |
        How many beeps are in the audio? | How many times does it beep? | How often does it beep? | Count the beeps. | Count the
        beeps in the sound. | What is the number of beeps? | Number of beeps? | Beep count? | What's the number of beeps? | Could
        you tell me how many beeps there are? | Please count the beeps for me. | Give me the number of beeps. | Tell me how often it
        beeps. | How many beeps? | How many beeps does the recording have? | How many beeps did you hear? | How many beeps does the
        audio file contain? | What's the total number of beeps? | Can you count the beeps in this recording? | How many times do you
        hear a beep? | How many times is there a beep? | How many beeps were there? | It beeps how many times? | Say how many beeps
        you hear. | I'd like to know the number of beeps. | Listen and count the beeps.
        """,
        "tone_noise": """
        Is it a tone or noise? | Is this a tone or noise? | Is this noise or a tone? | Is the sound a tone or noise? | Do you hear a
        tone or noise? | Do you hear noise or a tone? | What kind of sound is it? | What kind of sound is this? | Tone or noise? |
        Is the audio a tone or noise? | Noise or tone? | Is that noise or a tone? | What's this, a tone or noise? | Could you tell
        me if it's a tone or noise? | Tell me if you hear a tone or just noise. | Is the recording a tone or noise? | Does the audio
        file contain a tone or noise? | Is it a clear tone or only noise? | Is it noise, or is it a tone? | Would you call it a tone
        or noise? | Is the audio noise or a tone? | Does it sound like a tone or like noise? | Which is it, noise or a tone? |
        Identify the sound as tone or noise.
        """,
        "sound_describe": """
        What do you hear? | What do you hear in the audio? | What can you hear? | What is in the audio? | What sound is this? |
        Which sound do you hear? | Describe the sound. | Describe the audio. | What is this sound? | Tell me what you hear. | What's
        that sound? | What's in the audio? | Could you describe the sound? | Tell me about the sound. | Give me a description of the
        audio. | What's in this recording? | What does the audio file contain? | Please describe what you hear. | What are you
        hearing? | What am I listening to? | Identify the sound. | Sound description? | What is there to hear? | What did you hear
        in the recording? | What can be heard in this audio file? | Say what you hear. | Listen and tell me what it is. | What does
        the recording sound like? | Can you tell what this sound is? | I'd like to know what's in the audio.
        """,
        "match": """
        Does the sound match the picture? | Does the sound match the image? | Does the audio match the picture? | Do the beeps match
        the things? | Do the sound and the picture match? | Do the beeps match the picture? | Does the number of beeps match the
        number of things? | Does the number of beeps match the picture? | Are there as many beeps as things? | Are there as many
        beeps as shapes in the picture? | Is the number of beeps the same as the number of things? | Do the picture and the audio
        match? | Could you tell me if the sound fits the picture? | Is there one beep for each shape? | Is there a beep for every
        thing in the picture? | Same number of beeps and shapes? | As many beeps as objects? | Do the beeps and the shapes agree in
        number? | Are the beeps as many as the objects in the image? | Does the recording fit the image? | Do you hear as many beeps
        as you see shapes? | Check if the beeps match the objects. | Tell me if the audio matches the image. | Is the beep count
        equal to the number of shapes? | Are there equally many beeps and things?
        """,
        "video_match": """
        Does the sound match the video? | Does the audio match the video? | Do the beeps match the blinks? | Do the sound and the
        video match? | Do the beeps match the video? | Does the number of beeps match the number of blinks? | Are there as many
        beeps as blinks? | Does it beep as often as it blinks? | Is the number of beeps the same as the number of blinks? | Do the
        video and the audio match? | Could you tell me if the sound fits the video? | Is there one beep for each blink? | Is there a
        beep for every flash? | Same number of beeps and blinks? | As many beeps as flashes? | Do the beeps and the blinks agree in
        number? | Does the audio fit the clip? | Do you hear as many beeps as you see blinks? | Check if the beeps match the
        flashes. | Tell me if the sound matches the footage. | Is the beep count equal to the blink count? | Are there equally many
        beeps and blinks? | Does it blink as many times as it beeps?
        """,
    }
)
