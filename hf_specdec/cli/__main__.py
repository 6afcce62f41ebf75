"""`python -m hf_specdec.cli` is `specdec`."""

from hf_specdec.cli import main


if __name__ == "__main__":
    main()
