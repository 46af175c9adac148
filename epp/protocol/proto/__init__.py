"""Message classes generated from the `.proto` files beside this one (`make proto`); never edited by hand."""
