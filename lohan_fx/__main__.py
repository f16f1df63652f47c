"""``python -m lohan_fx``: the command line."""

from lohan_fx.cli import main

if __name__ == "__main__":
    main()
