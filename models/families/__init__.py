"""One module or package per model family, and what families share. ``registry`` lists them, ``family`` says what each has."""
