"""Run ``python -m lit_fed …`` as the installed script ``lit-fed …``."""

from lit_fed.command.start import main

if __name__ == "__main__":
    main()
