"""What `make device` runs on the device at hand: is it right, is it fast, is it small?

`benchmarks/device.py` starts one process for each part, so that a crash ends one part, and each has
the device's memory to itself. A part is a module here with `run(recorder)`. What flows is rows:
dictionaries that a part records as soon as it knows them, so that what was measured before a part
is ended is kept. `parts` lists the parts, in the order of their worth, with the seconds of each and
the columns of its table. `claims` reads the rows, and says which claims of the site hold. `page`
writes it all as Markdown. These three need Python alone, as the process that starts the others must
not touch the device.

To add a measurement: record a row in a part, or write a module and a line in `parts.PARTS`. To hold
a claim of the site to it: a line in `claims.CLAIMS`.
"""
