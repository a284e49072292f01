"""`python -m localfast` is the same program as `localfast`."""

from localfast.cli import main

if __name__ == "__main__":
    main()
