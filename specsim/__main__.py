"""python -m specsim"""

from specsim.cli import main

if __name__ == "__main__":
    main()
