"""Plain English prose, through which benches force models where no other text is given."""

PROSE = """\
The sun is a star. The Earth moves around it once a year, and the moon moves around the Earth about once a month. In
winter the days are short and cold, and in summer they are long and warm, because the axis of the Earth is tilted. Near
the equator the length of a day hardly changes, while beyond the polar circles the sun does not rise at all for some
weeks of the winter.

Water freezes at zero degrees Celsius and boils at one hundred degrees at the level of the sea. On a high mountain the
pressure of the air is lower, so water boils earlier, and it takes longer to cook potatoes there. When water freezes it
expands, which is why ice floats and why a bottle that is full of water may break in the cold.

Paris is the capital of France, and London is the capital of the United Kingdom. Rome, the capital of Italy, is much
older than both. For some centuries it was the largest city of the world, with perhaps a million people, who were fed
with grain from Egypt and Africa. Its roads and aqueducts were so well built that some of them are still in use.

A dog is an animal that many people keep as a pet. Its ancestors were wolves, which began to live near the camps of
hunters many thousand years ago. Cats came later, when people had learned to grow and store grain, and mice had learned
to eat it. Both animals have better ears than their owners, and both can see well when there is little light.

A library lends books. Whoever wants to borrow one needs a card, and has to bring the book back after some weeks. Large
libraries also have old newspapers, maps, music and films. Before printing was invented, books were copied by hand, and
a single one could cost as much as a house. Today a text can be sent around the world in less than a second, but nobody
knows whether it will be readable in five hundred years.

To bake bread, mix flour, water, salt and a little yeast, and knead the dough for ten minutes. Leave it in a warm place
until it has become twice as large. Then form a loaf, let it rest once more, and bake it in a hot oven for about forty
minutes. It is done when it sounds hollow if you knock on its bottom. Let it cool before you cut it, even if that is
hard.

A computer adds, compares and copies numbers, and does little else. A program is a list of such steps. Because the steps
are simple, a machine can do billions of them in a second, and because there are so many of them, it is hard to be sure
that a long program is right. People who write programs therefore test them: they choose an input for which the answer
is known, and look whether the program finds it. A test that passes does not prove that there are no mistakes, but a
test that fails shows where to look for one.
"""
