"""Message classes that `make proto` generates from the `.proto` files in this folder. Do not edit them by hand."""
