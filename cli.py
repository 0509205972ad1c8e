"""Run specsim from a checkout: python cli.py ..."""

from specsim.cli import main

if __name__ == "__main__":
    main()
