"""The only floor that knows gRPC and protobuf: servicers, the table of errors, peers, and the companion socket."""
