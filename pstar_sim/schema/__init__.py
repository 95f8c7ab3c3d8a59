"""The one schema library: every file format and option is a declared type, which msgspec reads. A refused value gets
one sentence.
"""
