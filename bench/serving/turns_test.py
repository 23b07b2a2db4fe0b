"""Engines that take turns: in rounds, in drawn orders, whoever ends."""

from __future__ import annotations

import asyncio
import contextlib
import pathlib
import tempfile
import unittest

from turns import Turn, Turns


class TurnsTest(unittest.TestCase):
    def setUp(self) -> None:
        self.path = pathlib.Path(self.enterContext(tempfile.TemporaryDirectory())) / "turns"

    def test_rounds_in_drawn_orders(self) -> None:
        working, order = [0], []

        async def engine(number: int, turns: int) -> None:
            turn = Turn(str(self.path))
            for _ in range(turns):
                async with turn.taken():
                    working[0] += 1
                    self.assertEqual(1, working[0])
                    order.append(number)
                    await asyncio.sleep(0.001)
                    working[0] -= 1
            turn.close()
            given.leave()

        async def all_engines() -> None:
            await asyncio.gather(*(engine(number, 8 if number else 4) for number in range(3)))

        with contextlib.closing(Turns(self.path, 3)) as given:
            asyncio.run(all_engines())
        rounds = [tuple(order[at : at + 3]) for at in range(0, 12, 3)]
        for each in rounds:
            self.assertEqual({0, 1, 2}, set(each))
        self.assertEqual(4 * [{1, 2}], [set(order[at : at + 2]) for at in range(12, 20, 2)], "one has left")
        self.assertGreater(len(set(rounds)), 1)

    def test_an_engine_that_ends_in_its_turn_holds_up_nobody(self) -> None:
        with contextlib.closing(Turns(self.path, 2)) as given:
            async def both() -> None:
                dying, living = Turn(str(self.path)), Turn(str(self.path))

                async def die() -> None:
                    async with dying.taken():
                        dying.close()
                        given.leave()
                        raise ConnectionError

                async def live() -> int:
                    for _ in range(3):
                        async with living.taken():
                            pass
                    living.close()
                    return 3

                found = await asyncio.wait_for(asyncio.gather(die(), live(), return_exceptions=True), 30)
                self.assertEqual(3, found[1])
            asyncio.run(both())

    def test_without_a_path_every_turn_is_its_own(self) -> None:
        async def engine() -> int:
            async with Turn("").taken():
                return 1

        self.assertEqual(1, asyncio.run(engine()))


if __name__ == "__main__":
    unittest.main()
