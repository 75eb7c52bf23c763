"""Runs the command line as `python -m layerskip` if the console script is not on the path."""

from layerskip.cli.main import main

if __name__ == "__main__":
    main()
