"""How people ask about pictures, in many wordings with slots."""

from .kinds import alternatives

PICTURE_PHRASES = alternatives(
    {
        "shape": """
        What shape is in the picture? | What shape is in the image? | What shape is this? | What shape is it? | Which shape do you
        see? | What shape do you see in the picture? | What is the shape in this picture? | Which shape is this? | Name the shape in
        the image. | Tell me the shape. | What kind of shape is shown? | What's the shape? | Could you tell me which shape this is?
        | Identify the shape in this photo. | Shape? | Which geometric figure is this? | What form does the object have? | Please
        name this shape. | Which shape do you recognise here? | Give me the name of the shape. | What sort of figure appears in the
        drawing? | The object in the pic is what shape? | I'd like to know what shape that is.  | What
        type of shape does the photograph contain?
        """,
        "colour": """
        What colour is it? | What color is it? | What colour is the shape? | What color is the shape? | What colour is the thing in
        the picture? | Which colour does the shape have? | Which color is this? | What is the colour of the shape? | Name the colour
        of the object. | Tell me the colour. | What color is the object in the image? | What's the colour? | What's its color? |
        Colour? | Color of the object? | Could you tell me the color, please? | Identify the colour of this figure. | Give me the
        color. | The thing shown is what colour? | Which colour is used in the drawing? | What color appears in this photo? | Can
        you say what colour this item is? | I'd like to know its colour. | In what color is the figure drawn? | Which color do you
        notice here?
        """,
        "describe": """
        What is in this picture? | What is in this image? | What is in the picture? | What do you see? | What do you see in the
        picture? | What can you see in this image? | Describe the picture. | Describe this image. | What does the image show? | What
        is shown in the picture? | Tell me what you see. | What is this? | Name the things in the picture. | What's in the picture?
        | What's this a picture of? | What does this photo depict? | Could you describe this pic for me? | Contents of the image? |
        Tell me what is in the drawing. | What objects appear in this picture? | Give me a description of the image. | Can you
        identify everything in the photo? | What do you notice in this drawing? | Please describe what the picture shows. | List the
        items in the image. | What am I looking at? | What does the picture contain? | Say what is on display here. | Which things
        can you spot in the image? | I'd like to know what the photo shows. | What's displayed in this photograph? | What can be
        seen here? | What has been drawn?
        """,
        "size": """
        Is it big or small? | Is the shape big or small? | Is the {shape} big or small? | Is the {colour} {shape} small or big? |
        How big is it? | How big is the {shape}? | What size is the shape? | What size is the {shape}? | Big or small? | Is the
        thing in the picture small or big? | What's the size of the {colour} {shape}? | Is the {colour} {shape} large or small? |
        How large is the {colour} {shape}? | Tell me the size of the {colour} {shape}. | {colour} {shape}: big or small? | Could you
        tell me how big that {colour} {shape} is? | Size of the {shape}? | Does the {shape} look big or small? | Would you call the
        {shape} large or little? | Is this a small {shape} or a big one? | Size? | Give me the size of the object. | How large does
        the figure appear? | Large or small?
        """,
        "position": """
        Where is it? | Where is the {shape}? | Where is the {colour} {shape}? | Where is the shape in the picture? | Where in the
        picture is the {shape}? | In which part of the picture is the {shape}? | In which part of the image is it? | What is the
        position of the shape? | What is the position of the {shape}? | Where do you see the {colour} {shape}? | Where's the
        {colour} {shape}? | Position of the {colour} {shape}? | Tell me where the {colour} {shape} is. | Could you locate the
        {colour} {shape} for me? | In what area of the photo is the {colour} {shape}? | Where does the {colour} {shape} appear? |
        Find the {shape} and say where it is. | Where has the {shape} been placed? | What's the location of the {shape}? |
        Whereabouts in the drawing can I spot the {shape}? | Where? | Please give me the location of the object. | Which part of the
        photo contains the figure? | Can you tell me where the item is located?
        """,
        "count": """
        How many things are there? | How many things are in the picture? | How many things do you see? | How many shapes are there?
        | How many shapes are in the picture? | How many shapes do you see in the image? | How many objects are in the image? | How
        many objects can you see? | Count the things in the picture. | Count the shapes. | What is the number of shapes? | How many?
        | Number of objects? | What's the total number of things? | Could you count the objects for me? | Tell me how many shapes
        you can spot. | Give me the number of items in the photo. | How many figures does the drawing contain? | How many items
        appear here? | Please count all the figures. | What's the object count? | How many objects does the picture show? | How many
        forms have been drawn? | Can you say how many things are shown? | I'd like to know the number of shapes here. | Total number
        of shapes in the pic? | How many separate items do you notice? | The image contains how many objects? | Count everything you
        see. | How many shapes are displayed altogether? | What number of figures can be seen?
        """,
        "count_shape": """
        How many {shapes} are there? | How many {shapes} are in the picture? | How many {shapes} do you see? | How many {shapes} can
        you see in the image? | How many of the shapes are {shapes}? | How many things are {shapes}? | Count the {shapes}. | Count
        the {shapes} in the picture. | What is the number of {shapes}? | Number of {shapes}? | Could you tell me how many {shapes}
        there are? | Give me the number of {shapes} in the photo. | How many {shapes} can be spotted? | What's the {shapes} count? |
        How many {shapes} does this drawing contain? | Tell me the total number of {shapes}. | Please count up all the {shapes} you
        see. | The picture has how many {shapes}? | How many {shapes} appear in the pic? | How many {shapes}? | How many of these
        figures are {shapes}? | I'd like to know how many {shapes} are shown. | Of all the objects, how many are {shapes}?
        """,
        "count_colour": """
        How many {colour} things are there? | How many {colour} things are in the picture? | How many {colour} shapes do you see? |
        How many {colour} shapes are there? | How many {colour} objects are in the image? | How many things are {colour}? | How many
        of the shapes are {colour}? | Count the {colour} things. | Count the {colour} shapes in the picture. | What is the number of
        {colour} shapes? | Number of {colour} things? | Could you tell me how many items are {colour}? | Give me the number of
        {colour} objects in the photo. | How many {colour} figures can be spotted? | What's the count of {colour} shapes? | How many
        {colour} items does this drawing contain? | Tell me the total number of {colour} objects. | Please count everything that is
        {colour}. | The picture has how many {colour} things? | How many {colour} forms appear in the pic? | How many are {colour}?
        | How many objects have the colour {colour}? | I'd like to know how many {colour} shapes are shown. | Of all the figures,
        how many are {colour}?
        """,
        "count_both": """
        How many {colour} {shapes} are there? | How many {colour} {shapes} are in the picture? | How many {colour} {shapes} do you
        see? | How many {colour} {shapes} can you see in the image? | How many of the {shapes} are {colour}? | Count the {colour}
        {shapes}. | Count the {colour} {shapes} in the image. | What is the number of {colour} {shapes}? | Number of {colour}
        {shapes}? | Could you tell me how many {colour} {shapes} there are? | Give me the number of {colour} {shapes} in the photo.
        | How many {colour} {shapes} can be spotted? | What's the count of {colour} {shapes}? | How many {colour} {shapes} does this
        drawing contain? | Tell me the total number of {colour} {shapes}. | Please count all {colour} {shapes} you notice. | The
        picture has how many {colour} {shapes}? | How many {colour} {shapes} appear in the pic? | How many {colour} {shapes}? | How
        many objects are {colour} {shapes}? | I'd like to know how many {colour} {shapes} are shown. | Among the {shapes}, how many
        are {colour}?
        """,
        "exists": """
        Is there {a} {colour} {shape}? | Is there {a} {colour} {shape} in the picture? | Is there {a} {colour} {shape} in the image?
        | Do you see {a} {colour} {shape}? | Can you see {a} {colour} {shape}? | Can you see {a} {colour} {shape} in this image? |
        Does the picture show {a} {colour} {shape}? | Is {a} {colour} {shape} in the picture? | Any {colour} {shape} here? | Could
        you tell me if there's {a} {colour} {shape}? | Does the photo contain {a} {colour} {shape}? | Do you spot {a} {colour}
        {shape} anywhere? | Is {a} {colour} {shape} shown? | Does {a} {colour} {shape} appear in the drawing? | Tell me whether you
        see {a} {colour} {shape}. | Has {a} {colour} {shape} been drawn? | {a} {colour} {shape} in the pic, yes or no? | Can {a}
        {colour} {shape} be found in this photograph? | Is one of the objects {a} {colour} {shape}? | There's {a} {colour} {shape}
        in the image, correct? | Did you notice {a} {colour} {shape}? | Please check for {a} {colour} {shape}.
        """,
        "exists_shape": """
        Is there a {shape}? | Is there a {shape} in the picture? | Is there a {shape} in the image? | Do you see a {shape}? | Can
        you see a {shape}? | Can you see a {shape} in the picture? | Does the image show a {shape}? | Is a {shape} in the picture? |
        Any {shape} here? | Could you tell me if there's a {shape}? | Does the photo contain a {shape}? | Do you spot a {shape}
        anywhere? | Is a {shape} shown? | Does a {shape} appear in the drawing? | Tell me whether you see a {shape}. | Has a {shape}
        been drawn? | A {shape} in the pic, yes or no? | Can a {shape} be found in this photograph? | Is one of the objects a
        {shape}? | There's a {shape} in the image, correct? | Did you notice a {shape}? | Please check for a {shape}.
        """,
        "exists_colour": """
        Is there {a} {colour} thing? | Is there {a} {colour} thing in the picture? | Is there {a} {colour} shape in the image? | Do
        you see {a} {colour} shape? | Can you see {a} {colour} thing? | Is there something {colour} in the picture? | Do you see
        something {colour}? | Does the picture show something {colour}? | Anything {colour} here? | Could you tell me if there's {a}
        {colour} object? | Does the photo contain {a} {colour} item? | Do you spot anything {colour}? | Is {a} {colour} figure
        shown? | Does something {colour} appear in the drawing? | Tell me whether anything is {colour}. | Has something been drawn
        in {colour}? | Something {colour} in the pic, yes or no? | Can {a} {colour} object be found in this photograph? | Is one of
        the shapes {colour}? | There's something {colour} in the image, correct? | Did you notice {a} {colour} form? | Please check
        for {colour} things.
        """,
        "exists_number": """
        Are there {number} {group}? | Are there {number} {group} in the picture? | Are there exactly {number} {group}? | Are there
        exactly {number} {group} in the image? | Do you see exactly {number} {group}? | Can you see exactly {number} {group}? | Does
        the picture show exactly {number} {group}? | Are {number} {group} in the picture? | Is the number of {group} {number}? |
        Could you tell me if there are {number} {group}? | Does the photo contain just {number} {group}? | Do you spot {number}
        {group}, no more and no less? | Are exactly {number} {group} shown? | Tell me whether you see {number} {group}. | The pic
        has {number} {group}, yes or no? | There are {number} {group} in the image, correct? | I count {number} {group}, is that
        right? | Please check for exactly {number} {group}. | Is it true that there are {number} {group}? | Did you count {number}
        {group}? | Have exactly {number} {group} been drawn? | Are there {number} {group} or not? | Is {number} how many {group}
        there are?
        """,
        "find_colour": """
        What colour is the {shape}? | What color is the {shape}? | Which colour does the {shape} have? | Which color is the {shape}?
        | What is the colour of the {shape}? | What is the color of the {shape} in the picture? | Name the colour of the {shape}. |
        Tell me the colour of the {shape}. | The {shape} has which colour? | What's the colour of the {shape}? | Could you tell me
        what color the {shape} is? | Colour of the {shape}? | Give me the color of the {shape}. | Identify the {shape}'s colour. |
        In what colour is the {shape} drawn? | The {shape} is what color? | Look at the {shape}. Which colour is it? | Can you say
        which color the {shape} has? | What color does the {shape} appear in? | I'd like to know the colour of the {shape}. | What's
        the {shape}'s color in this photo? | Find the {shape} and name its colour. | Which colour was used for the {shape}?
        """,
        "find_shape": """
        What shape is the {colour} thing? | What shape is {colour}? | Which shape is {colour}? | What is the shape of the {colour}
        thing? | What is the {colour} thing? | Which shape does the {colour} thing have? | Name the {colour} shape. | Tell me the
        shape of the {colour} object. | What is {colour} in the picture? | What's the shape of the {colour} item? | Could you tell
        me which shape is {colour}? | Shape of the {colour} object? | Give me the name of the {colour} shape. | Identify the
        {colour} figure. | Which figure is drawn in {colour}? | The {colour} object is what shape? | Look at the {colour} item. What
        shape is it? | What {colour} shape do you recognise? | What form does the {colour} object have? | I'd like to know the shape
        of the {colour} thing. | What's the {colour} figure in this photo? | Find the {colour} object and name its shape. | What
        kind of shape has the colour {colour}?
        """,
        "side": """
        Is the {one} left or right of the {other}? | Is the {one} to the left or to the right of the {other}? | Is the {one} on the
        left or on the right of the {other}? | Is the {one} right or left of the {other}? | On which side of the {other} is the
        {one}? | Is the {one} to the right or to the left of the {other}? | Left or right: where is the {one} from the {other}? |
        Seen from the {other}, is the {one} left or right? | Is the {one} left of the {other} or right of it? | Could you say if the
        {one} is left or right of the {other}? | Tell me which side of the {other} the {one} is on. | From the {other}, is the {one}
        on the left or the right? | Which side of the {other} is the {one} on? | Does the {one} appear left or right of the {other}?
        | The {one}: left or right of the {other}? | To which side of the {other} do you see the {one}? | Looking from the {other},
        which way is the {one}? | Has the {one} been drawn left or right of the {other}? | Going from the {other} to the {one}, left
        or right? | Do you spot the {one} right or left of the {other}? | Side of the {other} where the {one} is? | Is the {one} on
        the {other}'s left or right?
        """,
        "digits": """
        What number do you see? | What number is in the picture? | What number is this? | What number is in the image? | Which
        number do you see? | Which number is shown? | Read the number. | Read the digits in the picture. | What are the digits? |
        Which digits do you see? | What does the number say? | Tell me the number in the image. | What's the number? | Number shown?
        | Could you read the number for me? | Give me the number in this photo. | Identify the digits in the image. | What number
        does the picture show? | Which digits appear in the drawing? | What number is written here? | Please read out the digits. |
        What do the digits say? | Which number do you recognise? | I'd like to know which number this is. | Digits? | What does it
        read? | The picture contains which number? | Tell me which digits you can spot. | What number has been drawn? | What number
        is displayed in the pic? | Which number does the photograph depict? | Say the number you see.
        """,
        "number_colour": """
        What colour is the number? | What color is the number? | What colour is it? | What color is it? | What colour are the
        digits? | What color are the digits? | Which colour does the number have? | What is the colour of the number? | Tell me the
        colour. | What's the colour of the digits? | What's the number's color? | Colour of the number? | Color of the digits? |
        Could you tell me what colour the number is? | Identify the color of the number. | Give me the colour of the digits. | The
        number is shown in which color? | In what colour is the number written? | Which color do the digits have? | Can you say
        which color the digits are? | I'd like to know the colour of the number. | Which colour was used for the digits? | What
        color does the number appear in?
        """,
        "pair_more": """
        Which picture has more things? | Which image has more things? | Which picture shows more shapes? | Which of the two pictures
        has more shapes? | Are there more things in the first or in the second picture? | Does the first or the second image have
        more shapes? | Where are more things? | In which picture are more shapes? | Which of the images has more objects? | Which
        one has more objects? | Which photo contains more items? | Tell me which picture has more figures. | Could you say which
        image shows more things? | More objects: the first or the second? | What picture has the larger number of shapes? | Is the
        number of things higher in the first or second? | Where do you count more objects? | Which of these two drawings contains
        more shapes? | In which photo do more objects appear? | Compare the counts: which image has more? | Where can you spot more
        items, first or second? | Which has more shapes, or is it the same? | First or second pic: which has more in it?
        """,
        "pair_count": """
        How many things are in the {nth} picture? | How many things are in the {nth} image? | How many shapes are in the {nth}
        picture? | How many shapes does the {nth} image have? | How many shapes do you see in the {nth} picture? | How many objects
        are in the {nth} image? | Count the things in the {nth} picture. | Count the shapes in the {nth} image. | Number of objects
        in the {nth} picture? | Could you count the items in the {nth} photo? | Tell me how many things the {nth} image shows. |
        Give me the number of shapes in the {nth} picture. | What's the total number of things in the {nth} image? | How many
        figures does the {nth} drawing contain? | How many objects appear in the {nth} photo? | The {nth} picture has how many
        items? | In the {nth} image, how many shapes are there? | How many things can you spot in the {nth} one? | Look at the {nth}
        picture. How many objects? | How many items are shown in the {nth} photograph? | I'd like the object count for the {nth}
        image. | How many forms have been drawn in the {nth} pic?
        """,
        "pair_colour": """
        Do both have the same colour? | Do both have the same color? | Do the two shapes have the same colour? | Is the colour the
        same in both pictures? | Is the color the same in both images? | Are both shapes of the same colour? | Are the colours the
        same? | Do the pictures show the same colour? | Same colour? | Do the colours match? | Is it the same color twice? |
        Identical colours? | Could you tell me if they share one colour? | Are they the same color? | Is the first the same colour
        as the second? | Tell me whether the two colors are equal. | Are both objects equal in colour? | Does the second figure have
        the color of the first? | Do the objects in these photos match in colour? | Is the color of the two items identical? | Do
        both drawings use the same colour? | Colors the same in both, yes or no? | Have the two figures been drawn in the same
        color?
        """,
        "pair_shape": """
        Do both have the same shape? | Do the two things have the same shape? | Is the shape the same in both pictures? | Is the
        shape the same in both images? | Are both things of the same shape? | Are the shapes the same? | Do the pictures show the
        same shape? | Do both pictures show the same shape? | Same shape? | Do the shapes match? | Is it the same shape twice? |
        Identical shapes? | Could you tell me if they share one shape? | Are they the same shape? | Is the first the same shape as
        the second? | Tell me whether the two shapes are equal. | Are both objects equal in shape? | Does the second object have the
        shape of the first? | Do the objects in these photos match in shape? | Is the form of the two items identical? | Do both
        drawings contain the same kind of shape? | Shapes the same in both, yes or no? | Is the same geometric form seen in each
        pic?
        """,
        "pair_bigger": """
        Which is bigger? | Which one is bigger? | Which shape is bigger? | Which thing is bigger? | Which picture shows the bigger
        thing? | Which picture has the bigger shape? | Which image has the bigger shape? | Where is the shape bigger? | In which
        picture is the shape bigger? | Is the first or the second shape bigger? | Which one's larger? | Which of the two is bigger?
        | Tell me which object is larger. | Could you say which figure is the bigger one? | Bigger: first or second? | Where do you
        see the larger object? | Which photo contains the larger shape? | Is the larger item in the first or second image? | What
        picture shows the larger figure? | Compare the sizes: which is larger? | In which drawing does the shape look bigger? | Of
        the two objects, which has the bigger size? | Does the first or the second pic have the bigger form? | Identify the bigger
        of the two shapes.
        """,
        "pair_which": """
        What is in the {nth} picture? | What is in the {nth} image? | What do you see in the {nth} picture? | What does the {nth}
        image show? | What does the {nth} picture show? | Describe the {nth} picture. | Describe the {nth} image. | What is shown in
        the {nth} picture? | What's in the {nth} picture? | Could you describe the {nth} photo for me? | Tell me what you see in the
        {nth} image. | Give me a description of the {nth} picture. | What does the {nth} photograph depict? | Contents of the {nth}
        image? | Which object appears in the {nth} drawing? | What does the {nth} pic contain? | Identify the object in the {nth}
        picture. | Look at the {nth} image. What's there? | What can be seen in the {nth} photo? | And the {nth} one, what does it
        show? | What has been drawn in the {nth} picture? | Please say what is displayed in the {nth} image.
        """,
    }
)
