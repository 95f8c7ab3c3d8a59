"""The one schema library: every file format and option is a declared type that msgspec reads. A refusal is one
sentence.

`fields` declares what a field may be and says it in words, `reading` turns values into a declared type or a `Fault`,
`records` does the same for dataclasses and their columns, `files` reads the text of TOML and JSON files and the version
at their head. Knows no format.
"""
