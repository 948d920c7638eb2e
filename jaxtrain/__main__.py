from jaxtrain.cli import main

main()
