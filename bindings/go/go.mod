module tandem

go 1.19
