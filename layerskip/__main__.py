"""`python -m layerskip`: the command line, where the console script is not on the path."""

from layerskip.cli.main import main

if __name__ == "__main__":
    main()
