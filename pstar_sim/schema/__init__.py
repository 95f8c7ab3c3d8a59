"""File formats and options are declared types, which msgspec reads; a refused value gets one sentence."""
