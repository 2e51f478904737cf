"""The notebooks: seven tutorials, kept with what they print and draw.

`python -m examples.notebooks --all` runs each in a new process, and fails if a cell raises, if one
takes longer than five minutes, or if what is kept differs from what was computed; `make notebooks`
runs those that a change reaches, and some others. To keep new results: `python -m
examples.notebooks --write`.

`pictures` is what the notebooks draw with, `running` runs one, `comparing` says what differs.
"""
