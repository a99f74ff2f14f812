"""Everyday questions for training: templates filled with topics.

People ask other questions than the target invents. No topic here is one of the held-out prompts, so
those stay unseen.
"""

from __future__ import annotations

import random


def _list(text: str) -> tuple[str, ...]:
    return tuple(" ".join(entry.split()) for entry in text.split(";"))


_SUBJECTS = _list(
    """gravity; evolution; the water cycle; climate change; global warming; the ozone layer; an
    earthquake; a volcano; a tsunami; a hurricane; the solar system; a black hole; a galaxy; the
    moon; an eclipse; the big bang theory; an atom; a molecule; DNA; genetics; natural selection;
    the human heart; the digestive system; the nervous system; the brain;
    cholesterol; blood pressure; diabetes; asthma; allergies; the flu; vitamins;
    protein; a calorie; inflation; supply and demand; the stock market; compound interest; a
    mortgage; insurance; a budget; taxes; cryptocurrency; blockchain; artificial intelligence;
    machine learning; a neural network; cloud computing; the internet; a search engine; a firewall;
    encryption; an operating system; a database; an algorithm; a compiler; quantum computing;
    electricity; magnetism; nuclear energy; solar power; wind power; a battery; an electric car; a
    jet engine; a microwave oven; a telescope; a microscope; a camera; a 3D printer; GPS; Bluetooth;
    radio; television; democracy; communism; capitalism; the constitution; human rights; the United
    Nations; the Industrial Revolution; the French Revolution; World War I; World War II; the Cold
    War; the Roman Empire; ancient Egypt; ancient Greece; the Silk Road; the Renaissance; the Great
    Depression; the civil rights movement; slavery; colonialism; philosophy; stoicism; ethics;
    religion; Buddhism; Islam; Christianity; Hinduism; mythology; psychology; memory; dreams;
    emotional intelligence; stress; anxiety; depression; meditation; mindfulness; yoga; exercise;
    nutrition; a balanced diet; veganism; coffee; tea; chocolate; cheese; bread; wine; football;
    basketball; tennis; chess; the Olympic Games; classical music; jazz; opera; ballet; painting;
    sculpture; photography; architecture; poetry; a novel; theater; cinema; the scientific method;
    probability; statistics; algebra; geometry; calculus; a prime number; the Pythagorean theorem;
    pi; infinity; logic; linguistics; grammar; the alphabet; sign language; translation; education;
    online learning; homework; university; a resume; marketing; advertising; branding;
    entrepreneurship; a startup; a business plan; teamwork; time management; public speaking;
    negotiation; customer service; remote work; recycling; pollution; plastic waste; deforestation;
    biodiversity; a rainforest; a coral reef; a desert; an ecosystem; a food chain; bees;
    butterflies; whales; dolphins; sharks; elephants; dinosaurs; penguins; spiders; snakes; cats;
    dogs; horses; trees; mushrooms; flowers; soil; rocks; diamonds; gold; oil; water; air; fire;
    light; sound; heat; time; friendship; love; happiness; success; justice; freedom; peace;
    poverty; homelessness; immigration; globalization; social media; privacy; fake news;
    cybersecurity; robots; space travel; Mars; satellites; agriculture; organic farming; fishing;
    transportation; trains; airplanes; bridges; tourism; fashion; money; banks; credit cards"""
)
_TASKS = _list(
    """lose weight; build muscle; run a marathon; eat healthier; stop smoking; reduce stress; wake
    up earlier; focus better; study for an exam; write an essay; learn Spanish; learn to cook; learn
    to swim; learn to draw; learn programming; play the piano; play chess; improve my memory;
    improve my English; improve my writing; read faster; make new friends; be more confident; give a
    speech; prepare for a job interview; find a job; write a resume; write a cover letter; start a
    business; start a blog; start a podcast; make money online; save money; invest my savings; pay
    off debt; buy a house; rent an apartment; buy a used car; change a tire; fix a leaky faucet;
    unclog a sink; paint a room; hang a picture; clean the oven; remove a coffee stain; do the
    laundry; iron a shirt; organize my closet; move to a new city; plan a wedding; plan a birthday
    party; plan a trip to Japan; travel on a budget; pack a suitcase; choose a camera; take better
    photos; edit a video; build a website; back up my computer; speed up my laptop; create a strong
    password; protect my privacy online; avoid scams; set up a printer; grow tomatoes; start a
    garden; take care of a houseplant; compost kitchen waste; train a puppy; adopt a cat; feed a
    baby; help my child with homework; teach my child to read; talk to a teenager; deal with a
    difficult coworker; handle conflict; say no politely; apologize to a friend; end a relationship;
    cope with grief; meditate; stretch before a workout; treat a cold; treat a burn; lower my blood
    pressure; relieve a headache; prevent back pain; drink more water; bake bread; bake a cake; boil
    an egg; cook rice; make pizza; make pancakes; brew good coffee; make ice cream; host a dinner;
    set the table; write a novel; write a song; write a thank-you note; write a book review; write a
    business plan; design a logo; run a meeting; manage a project; motivate employees; negotiate a
    contract; sell a product; open a bank account; file my taxes; vote in an election; volunteer;
    reduce my carbon footprint; recycle properly; save electricity; ride a horse; ski; surf; climb a
    mountain; camp in the woods; start a fire; read a map; survive in the desert; build a birdhouse;
    knit a scarf; sew a button; tie a tie"""
)
_PAIRS = _list(
    """weather and climate; a comet and an asteroid; a planet and a star; speed and velocity; mass
    and weight; heat and temperature; an acid and a base; an element and a compound; a plant cell
    and an animal cell; arteries and veins; a crocodile and an alligator; a frog and a toad; a
    butterfly and a moth; a fruit and a vegetable; butter and margarine; baking soda and baking
    powder; jam and jelly; tea and coffee; a democracy and a republic; a simile and a metaphor; a
    novel and a short story; affect and effect; its and it's; who and whom; a mean and a median;
    correlation and causation; a debit card and a credit card; stocks and bonds; a lease and a loan;
    a manager and an executive; a psychologist and a psychiatrist; a doctor and a nurse; a lawyer
    and a judge; a sea and an ocean; a hill and a mountain; a lake and a pond; rain and snow; fog
    and mist; RAM and ROM; hardware and software; HTTP and HTTPS; HTML and CSS; Java and JavaScript;
    Python and C++; a class and an object; a stack and a queue; an array and a linked list; a
    process and a thread; supervised and unsupervised learning; SQL and NoSQL databases; a router
    and a modem; a laptop and a tablet; empathy and sympathy; envy and jealousy; needs and wants; a
    goal and a dream; soccer and rugby; ballet and modern dance; a violin and a viola; an alto and a
    soprano; yoga and Pilates; a cold and the flu; type 1 and type 2 diabetes"""
)
_PEOPLE = _list(
    """Albert Einstein; Isaac Newton; Charles Darwin; Galileo Galilei; Nikola Tesla; Thomas Edison;
    Leonardo da Vinci; Michelangelo; Vincent van Gogh; Pablo Picasso; Frida Kahlo; Mozart;
    Beethoven; Bach; Shakespeare; Jane Austen; Charles Dickens; Mark Twain; Ernest Hemingway;
    Tolstoy; Homer; Socrates; Plato; Aristotle; Confucius; Buddha; Julius Caesar; Cleopatra;
    Alexander the Great; Genghis Khan; Napoleon; Queen Victoria; George Washington; Abraham Lincoln;
    Winston Churchill; Gandhi; Nelson Mandela; Martin Luther King Jr.; Rosa Parks; Mother Teresa;
    Anne Frank; Amelia Earhart; Neil Armstrong; Ada Lovelace; Alan Turing; Grace Hopper; Stephen
    Hawking; Florence Nightingale; Christopher Columbus; Marco Polo; Walt Disney; Steve Jobs"""
)
_PLACES = _list(
    """Paris; London; Rome; Berlin; Tokyo; New York; Cairo; Istanbul; Sydney; Rio de Janeiro; Mexico
    City; Mumbai; Beijing; Moscow; Athens; Venice; Barcelona; Vienna; Prague; Amsterdam; Iceland;
    Norway; Canada; Brazil; Argentina; Peru; Kenya; South Africa; Morocco; India; China; Thailand;
    Vietnam; New Zealand; Hawaii; California; Texas; Alaska; the Alps; the Sahara; the Amazon; the
    Great Barrier Reef; the Grand Canyon; Antarctica; the Himalayas; the Mediterranean Sea"""
)
_DISHES = _list(
    """chicken curry; spaghetti carbonara; lasagna; tomato sauce; mushroom risotto; fried rice;
    tacos; guacamole; hummus; falafel; a Greek salad; potato salad; scrambled eggs; an omelette;
    French toast; banana bread; apple pie; chocolate chip cookies; brownies; cheesecake; lemonade; a
    smoothie; beef stew; chili; roast chicken; grilled salmon; sushi; ramen; pad thai; paella;
    meatballs; mashed potatoes; oatmeal; granola; a sandwich for lunch; lentils; black beans"""
)
_FICTION = _list(
    """a lost dog; a haunted house; a time traveler; two rival chefs; a talking tree; a broken
    robot; a girl who can fly; a boy and his grandfather; a wolf in the city; a magic pencil; the
    last day of school; a pirate with a secret; an alien who visits a farm; a dragon who likes
    books; a letter from the future; a forgotten toy; a storm at sea; a detective and a missing
    painting; a knight without a sword; the moon and the stars; a mysterious package; a violin; a
    dancing bear; a train that never stops; a library at midnight; a painter who lost her colors; a
    cat who becomes mayor; an old clockmaker; a winter journey; a garden in space; the ocean;
    spring; the night sky; my mother; hope; loneliness; a river; the city at night; snow; a
    sunset"""
)
_LETTERS = _list(
    """a colleague to thank her for her help; my teacher to ask for more time; a customer whose
    order is late; a company to apply for an internship; a friend to invite him to my birthday; my
    neighbor about the loud music; a hotel to change my booking; the bank about a lost card; my team
    about the meeting tomorrow; a professor to ask for a recommendation; a client about a new price;
    the city council about a broken street light; my manager to ask for a day off; a store to return
    a pair of shoes; an old friend I have not seen for years; the parents of my students; a company
    that made a mistake in my bill; the editor of a newspaper"""
)
_PROGRAMS = _list(
    """checks whether a number is prime; reverses a string; sorts a list of numbers; finds the
    largest number in a list; counts the vowels in a string; removes duplicates from a list;
    computes the factorial of a number; merges two dictionaries; reads a file and counts its lines;
    converts miles to kilometers; checks whether two words are anagrams; generates a random
    password; adds two matrices; finds the second largest element; computes the average of a list;
    prints a pyramid of stars; validates an email address; downloads a web page; parses a JSON
    string; sums the digits of a number; finds the longest word in a sentence; rolls two dice;
    implements a queue; implements a linked list; implements quicksort; finds common elements of two
    lists; capitalizes every word; computes the area of a triangle; checks for leap years; converts
    a number to binary; plays rock, paper, scissors; keeps a to-do list"""
)
_TROUBLES = _list(
    """My car won't start; My phone battery dies too fast; My computer is very slow; I have a
    headache; My back hurts; I feel tired all day; I feel lonely; I am nervous before exams; I lost
    my job; I failed a test; My friend is angry with me; My neighbor is too loud; My dog barks all
    night; My cat does not eat; My plants are dying; There are ants in my kitchen; I spilled red
    wine on the carpet; I forgot my password; I always run late; I spend too much money; I can't
    concentrate at work; I am afraid of flying; My son does not like to read; My daughter wants a
    pet; I don't know what to study; I want to change my career; I moved to a new town; I have too
    many meetings; My boss never listens; I burned the dinner; My shoes are wet; It rains on my day
    off"""
)
_IDEAS = _list(
    """a birthday gift for my father; a new bakery; a band; a puppy; a rainy Sunday; a date night; a
    family dinner; a school project; a science fair; a summer vacation; a small garden; a team
    event; a charity event; a blog about travel; a mobile app; an online shop; a book club; a
    healthy breakfast; a quick lunch; a children's party; a costume; a slogan for a bank; a short
    film; a painting; a podcast about history; a home office; a wedding speech; a new hobby; a class
    about nature; a weekend with friends; a mystery game; a gym"""
)
_ROLES = _list(
    """teacher; nurse; doctor; lawyer; engineer; chef; farmer; pilot; police officer; firefighter;
    scientist; programmer; designer; journalist; writer; actor; musician; coach; parent; friend;
    student; salesperson; accountant; librarian; architect; gardener; mechanic; electrician; soldier
    in ancient Rome; sailor two hundred years ago; king of ancient Persia; miner in the gold rush;
    astronaut on a space station; shepherd"""
)
_WORKS = _list(
    """Hamlet; Macbeth; the Odyssey; Don Quixote; Moby-Dick; Pride and Prejudice; Frankenstein;
    Dracula; The Great Gatsby; 1984; Animal Farm; The Lord of the Rings; Harry Potter; Alice in
    Wonderland; Peter Pan; The Little Prince; Cinderella; Snow White; Little Red Riding Hood; The
    Wizard of Oz; The Jungle Book; Treasure Island; Robinson Crusoe; Sherlock Holmes; War and Peace;
    The Lion King; Titanic; Star Wars; Jurassic Park; The Matrix"""
)
_AGES = _list(
    "a child; a five-year-old; a beginner; a student; my grandmother; a high school class"
)
_NUMBERS = _list("two; three; 3; four; five; 5; six; 7; ten; 10; some; a few")

_FORMS = {
    "subject": _list(
        """What is {subject}?; What is {subject}?; What is {subject} and why is it important?; What
        do you know about {subject}?; Explain {subject}.; Explain {subject} to {age}.; Explain
        {subject} in simple words.; Can you explain {subject}?; Tell me about {subject}.; Tell me
        something interesting about {subject}.; Describe {subject}.; Define {subject}.; How does
        {subject} work?; Why is {subject} important?; What are the benefits of {subject}?; What are
        the advantages and disadvantages of {subject}?; What are the main causes of {subject}?; What
        is the history of {subject}?; Give me {number} facts about {subject}.; List {number} facts
        about {subject}.; Write a short paragraph about {subject}.; Write an essay about {subject}.;
        Write a short introduction to {subject}.; Summarize what is known about {subject}.; How has
        {subject} changed over time?; Who invented {subject}?; What are some common myths about
        {subject}?; I want to learn about {subject}. Where should I start?; What is the best book
        about {subject}?; What questions should I ask about {subject}?; How does {subject} affect
        our lives?; Write a quiz with {number} questions about {subject}.; Compare {subject} and
        {subject2}.; What is the relation between {subject} and {subject2}?; What is the future of
        {subject}?"""
    ),
    "task": _list(
        """How do I {task}?; How can I {task}?; What is the best way to {task}?; How do you {task}?;
        I want to {task}. What should I do?; I would like to {task}. Can you help me?; Can you help
        me {task}?; Give me {number} tips to {task}.; List {number} ways to {task}.; What do I need
        to {task}?; Is it hard to {task}?; How long does it take to {task}?; Explain step by step
        how to {task}.; What are common mistakes when people try to {task}?; I tried to {task}, but
        it did not work. Why?; Make a plan for me to {task}.; Should I {task}?; What should I know
        before I {task}?"""
    ),
    "pair": _list(
        """What is the difference between {pair}?; What's the difference between {pair}?; Explain
        the difference between {pair}.; Compare {pair}.; How do {pair} differ?; What do {pair} have
        in common?"""
    ),
    "person": _list(
        """Who was {person}?; Tell me about {person}.; What is {person} known for?; What did
        {person} do?; Write a short biography of {person}.; Why is {person} important?; Give me
        {number} facts about {person}.; When did {person} live?"""
    ),
    "place": _list(
        """What is {place} known for?; Tell me about {place}.; What should I see in {place}?; I am
        going to {place} next month. What should I do there?; Plan {number} days in {place}.; What
        is the weather like in {place}?; What is the history of {place}?; What food should I try in
        {place}?; Where is {place}?; Describe {place} in a few sentences."""
    ),
    "dish": _list(
        """How do I make {dish}?; Give me a recipe for {dish}.; Give me an easy recipe for {dish}.;
        What ingredients do I need for {dish}?; Can you give me a recipe for {dish}?; What goes well
        with {dish}?; Is {dish} healthy?"""
    ),
    "fiction": _list(
        """Write a short story about {fiction}.; Tell me a story about {fiction}.; Write a poem
        about {fiction}.; Write a short poem about {fiction}.; Write a haiku about {fiction}.; Write
        a song about {fiction}.; Write the first paragraph of a novel about {fiction}.; Suggest
        {number} titles for a book about {fiction}.; Write a dialogue about {fiction}."""
    ),
    "letter": _list(
        """Write an email to {letter}.; Write a polite email to {letter}.; Write a short letter to
        {letter}.; Help me write a message to {letter}.; Draft a letter to {letter}."""
    ),
    "program": _list(
        """Write a Python function that {program}.; Write a Python program that {program}.; Write a
        JavaScript function that {program}.; Write a function in C that {program}.; Write a Java
        method that {program}.; Write code that {program} and explain it.; Can you write a script
        that {program}?"""
    ),
    "trouble": _list(
        """{trouble}. What should I do?; {trouble}. What can I do?; {trouble}. Can you help me?;
        {trouble}. Why could that be?; {trouble}. Give me some advice.; {trouble}. What would you
        suggest?"""
    ),
    "idea": _list(
        """Give me {number} ideas for {idea}.; Suggest {number} names for {idea} and explain your
        choice.; I need ideas for {idea}.; Help me plan {idea}.; What do I need for {idea}?; Write
        an advertisement for {idea}.; Make a checklist for {idea}.; What makes {idea} special?"""
    ),
    "role": _list(
        """What makes a good {role}?; What does a {role} do all day?; Describe the life of a
        {role}.; How do I become a {role}?; What skills does a {role} need?; Write a short story
        about a {role}.; What are the problems of a {role}?; Write {number} interview questions for
        a {role}."""
    ),
    "work": _list(
        """Summarize the plot of {work}.; What is {work} about?; Who wrote {work} and why is it
        famous?; What is the main theme of {work}?; Describe the main character of {work}.; Write a
        short review of {work}.; Why do people like {work}?"""
    ),
}  # fmt: skip
# How often each group of forms is asked.
_WEIGHTS = {
    "subject": 30, "task": 20, "pair": 6, "person": 5, "place": 6, "dish": 4, "fiction": 6,
    "letter": 3, "program": 4, "trouble": 4, "idea": 5, "role": 4, "work": 3,
}  # fmt: skip
_ENTRIES = {
    "subject": _SUBJECTS, "task": _TASKS, "pair": _PAIRS, "person": _PEOPLE, "place": _PLACES,
    "dish": _DISHES, "fiction": _FICTION, "letter": _LETTERS, "program": _PROGRAMS,
    "trouble": _TROUBLES, "idea": _IDEAS, "role": _ROLES, "work": _WORKS, "age": _AGES,
    "number": _NUMBERS,
}  # fmt: skip


def question(rng: random.Random) -> str:
    """One of some fifteen thousand, numbers and second subjects not counted."""
    (group,) = rng.choices(list(_WEIGHTS), list(_WEIGHTS.values()))
    words = {name: rng.choice(entries) for name, entries in _ENTRIES.items()}
    return rng.choice(_FORMS[group]).format(**words, subject2=rng.choice(_SUBJECTS))
