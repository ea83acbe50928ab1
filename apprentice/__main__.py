"""`python -m apprentice` is the command `apprentice`."""

from .cli import main

main()
