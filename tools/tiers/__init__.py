"""What has to run again after a change: records of what ran, and samples of the rest.

A *unit* is something that passes or fails: an entry of torch's operator database, a notebook, a
sweep of cases in a test file. While a unit runs, `tracing` notes which files of this repository
execute; `record` keeps the unit with its files and a digest of their contents. When the unit has to
be decided on again, `choice` runs it

- if the digest of its files has changed, or it has no record;
- if the record is of other versions of Python, torch or JAX, or of another harness (the files that
  judge), which makes every unit run;
- else if it is in the sample: one of so many, drawn by a seed that every change of the sources
  changes, and that is printed.

Files that more than a quarter of all units execute are *common*: the engine's heart, of which a
change would run everything. They count for the seed alone, so a change there runs the sample, and
`make test-all` runs everything.

`sources` knows the files, their digests, and what they import.
"""
