"""The text on which components are compared where nobody gives another one."""

from typing import Final

TEXT: Final = """\
The train left the station a little after seven, when the street lamps were still lit. Mira had bought a
ticket to Oakmere, where her brother works as a baker, and she carried two books and a blue hat. "Is this seat
free?" asked a man with a grey coat. She nodded, and he sat down without another word.

Water boils at a lower temperature on a mountain, because the air there is thinner and presses less on its
surface. That is why beans take longer to cook at two thousand metres than they do by the sea. A lid helps:
it keeps the steam, and with it the heat, inside the pot.

First count the apples in each basket. There are 12 in the first, 7 in the second and 5 in the third, so there
are 24 in all. If four children share them equally, each child gets 6 apples, and nothing is left over.

def mean(values):
    total = 0.0
    for value in values:
        total += value
    return total / len(values)

Dear Sir or Madam, on the third of May I ordered a lamp from your shop. It arrived on Friday, but the glass is
broken. I would like to have it replaced, or else my money back. Please tell me how to return the parcel.

The council met on Tuesday evening to decide about the old bridge. Most speakers wanted to repair it, although
a new one would cost less over thirty years. The vote was postponed until an engineer has looked at the piers.
"""
