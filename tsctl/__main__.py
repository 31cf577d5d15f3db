"""`python -m tsctl`."""

from tsctl import main

main()
