"""The state of a running picker, at present and in the last 15 minutes: shared memory -> looks -> figures -> pages and `epp top`.

source    attaches to the shared memory read-only and takes looks; a *look* is one copy of it (`look`)
figures   computes figures from one look and the look before it; pure
history   samples a few figures once per second into a bounded ring
frames    makes one frame per second for all viewers: the changes since the previous frame
page      serves `/debug/state`, its stream of frames, and the history
"""
