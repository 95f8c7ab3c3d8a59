"""A session's parts. Timetable and cursor decide, and know no torch; the others carry out."""
