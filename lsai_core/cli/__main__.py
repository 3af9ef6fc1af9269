from lsai_core.cli import main

main()
