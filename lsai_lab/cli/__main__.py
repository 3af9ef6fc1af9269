from lsai_lab.cli import main

main()
