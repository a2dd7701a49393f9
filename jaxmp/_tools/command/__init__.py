"""The `jaxmp` command: `doctor`, `plan` and `audit`.

`main` parses the arguments and calls a `Command` of the table `COMMANDS` in `commands`. A command
returns an `Output`: a report, and the text of a failed check. `output` prints it.

Read `commands` first: its table `CHECKS` has the names of `--check`, which `AuditReport.check` runs
(`_tools/inspect/checks.py`). `program` imports the user's program. Only the report of `doctor` is
made here: `machine` reads the facts of the machine. A new command is a row of `COMMANDS`; a remark
of the doctor is an entry of one of the tables in `machine`.
"""
