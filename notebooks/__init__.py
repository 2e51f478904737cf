"""The notebooks: six tutorials, kept with what they print and draw.

`python -m notebooks` (or `make notebooks`) runs each in a new process, and fails if a cell raises,
if one takes longer than three minutes, or if what is kept differs from what was computed. To keep
new results after a change: `python -m notebooks --write`.

`pictures` is what the notebooks draw with, `running` runs one, `comparing` says what differs.
"""
