"""`python -m torchbcos`, where the command itself is not on the path."""

from torchbcos.cli import main

if __name__ == "__main__":
    main()
