"""Files written by runs and searches: their contents, reading and writing; without torch."""
